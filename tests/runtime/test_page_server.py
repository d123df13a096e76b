"""The server of a page, over real sockets, and what Chromium makes of a page that follows, where it is installed."""

from __future__ import annotations

import itertools
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from oobleck.errors import UsageError
from oobleck.runtime.page_server import PageServer
from oobleck.ui.pictures import LIVE_HEADERS, live_page
from tests.serving import serving

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]


@contextmanager
def served(page: Callable[[], str], headers: Mapping[str, str] = LIVE_HEADERS) -> Iterator[PageServer]:
    with serving(PageServer(page, port=0, headers=headers)) as server:
        yield server


def raw(server: PageServer, request: bytes) -> bytes:
    with socket.create_connection(server.server_address[:2], timeout=20) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(4096), b""))


def test_only_who_knows_the_address_sees_the_page():
    with served(lambda: "secret") as server:
        path = server.page_path.encode()
        assert len(path) > 20
        assert b" 200 " in (whole := raw(server, b"GET %s HTTP/1.1\r\n\r\n" % path))
        assert whole.endswith(b"\r\n\r\nsecret")
        for other in (b"/", b"/favicon.ico", path[:-1], path + b"x", path + b"?x", path.swapcase(), b"/\xff/", b"*"):
            answer = raw(server, b"GET %s HTTP/1.1\r\n\r\n" % other)
            assert answer.startswith(b"HTTP/1.0 404 "), other
            assert b"secret" not in answer


def test_nobody_changes_anything():
    with served(lambda: "page") as server:
        for method in (b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS"):
            answer = raw(server, b"%s %s HTTP/1.1\r\n\r\n" % (method, server.page_path.encode()))
            assert answer.startswith(b"HTTP/1.0 501 "), method


def test_the_address_is_told_to_nobody_else_and_no_other_script_runs():
    with served(lambda: "page") as server, urllib.request.urlopen(server.url, timeout=20) as answer:
        assert server.url.startswith("http://127.0.0.1:")
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "default-src 'none'; script-src 'sha256-" in answer.headers["Content-Security-Policy"]


def test_each_server_has_a_token_of_its_own_and_a_port_that_is_taken_is_named():
    with served(str) as one, served(str) as other:
        assert one.page_path != other.page_path
        with pytest.raises(UsageError, match=f"--port: cannot listen on 127.0.0.1:{one.server_port}: Address already"):
            PageServer(str, port=one.server_port, headers={})


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_keeps_the_page_up_to_date_and_complains_about_nothing(tmp_path):
    numbers = itertools.count(1)
    pages = (
        f"<html><head><title>t</title></head><body><main>page {number}<details{' open' if number == 1 else ''}>"
        "<summary>plan</summary>x</details></main></body></html>"
        for number in numbers
    )
    with served(lambda: live_page(next(pages))) as server:
        command = [str(BROWSER), *QUIET, f"--user-data-dir={tmp_path}", "--virtual-time-budget=7000", "--dump-dom"]
        done = subprocess.run([*command, server.url], capture_output=True, text=True, timeout=60, check=False)
    shown = int(re.search(r"page (\d+)", done.stdout)[1])
    assert 3 <= shown < next(numbers)
    assert '<details open="">' in done.stdout, "what the reader has open stays open"
    assert '<p id="gone" hidden' in done.stdout
    assert not [line for line in done.stderr.splitlines() if ":CONSOLE" in line and "favicon" not in line]
