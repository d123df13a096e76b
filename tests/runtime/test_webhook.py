"""Messages of a run reach a webhook, and nothing that it does harms the run."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from oobleck.control.journal import JobEnded, Notice
from oobleck.runtime.webhook import Webhook
from tests.serving import serving


@contextmanager
def receiver(refusals: int = 0, redirect: int = 0, takes_s: float = 0) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that refuses some messages first, or redirects all; yields its URL, and the messages it has taken.

    It answers a while after it has taken one.
    """
    taken: list[dict[str, str]] = []
    left = refusals

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal left
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if left:
                left -= 1
                self.send_error(503)
                return
            if redirect:
                self.send_response(redirect)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                return
            taken.append(json.loads(body))
            time.sleep(takes_s)
            self.send_response(200)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}/hook", taken


class Dripping(BaseRequestHandler):
    """Sends an answer's header byte by byte, for a minute: each byte comes in time, and the answer never does."""

    def handle(self) -> None:
        with suppress(OSError):
            self.request.recv(1 << 16)
            self.request.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            for _ in range(300):
                time.sleep(0.2)
                self.request.sendall(b"a")


class Dripper(ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


def notice(level: str, text: str) -> Notice:
    return Notice(t_s=1.0, level=level, text=text)


async def tell(url: str, *entries: Notice | JobEnded) -> None:
    webhook = Webhook(url, "mine")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(webhook.run)
        for entry in entries:
            webhook.tell(entry)
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


@pytest.fixture
def autojump_clock() -> None:
    """Not here: the server's time is real."""


async def test_what_matters_is_told_also_as_the_run_ends() -> None:
    ended = JobEnded(t_s=2.0, exit_code=0, reason="all 5 steps are committed")
    with receiver() as (url, taken):
        await tell(url, notice("info", "nothing much"), notice("error", "node3 is lost"), ended)
    assert taken == [{"text": "mine: node3 is lost"}, {"text": "mine: all 5 steps are committed"}]


async def test_a_refused_message_is_sent_again() -> None:
    with receiver(refusals=1) as (url, taken):
        await tell(url, notice("warning", "slow"))
    assert taken == [{"text": "mine: slow"}]


async def test_a_receiver_that_is_gone_costs_one_warning_without_its_url(caplog: pytest.LogCaptureFixture) -> None:
    with receiver() as (url, _):
        pass
    webhook = Webhook(url, "mine")
    with caplog.at_level(logging.WARNING), trio.move_on_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(webhook.run)
            for _ in range(300):  # more than wait
                webhook.tell(notice("error", "x"))
            await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
    assert [record.message.split(":")[0] for record in caplog.records] == ["control.webhook_url"]
    assert url not in caplog.text


@pytest.mark.parametrize("code", [301, 302, 303, 307])
async def test_a_redirect_is_no_delivery(code: int, caplog: pytest.LogCaptureFixture) -> None:
    with receiver(redirect=code) as (url, taken), caplog.at_level(logging.WARNING):
        await tell(url, notice("error", "node3 is lost"))
    problem = f"HTTP {code}, a redirect: name its target"
    assert [record.message for record in caplog.records] == [
        f"control.webhook_url: messages are not delivered: {problem}"
    ]
    assert not taken


async def test_a_message_under_way_as_the_run_ends_arrives_once() -> None:
    with receiver(takes_s=0.5) as (url, taken):
        webhook = Webhook(url, "mine")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(webhook.run)
            webhook.tell(notice("error", "node3 is lost"))
            with trio.fail_after(20):
                while not taken:  # noqa: ASYNC110  a thread takes it
                    await trio.sleep(0.02)
            webhook.tell(notice("error", "node4 is lost"))
            nursery.cancel_scope.cancel()
    assert taken == [{"text": "mine: node3 is lost"}, {"text": "mine: node4 is lost"}]


@pytest.fixture
def quick_clock() -> MockClock:
    """Ten seconds of the run are one of the server."""
    return MockClock(rate=10)


async def test_a_receiver_whose_answer_never_ends_delays_the_end_by_ten_seconds_and_costs_one_warning(
    quick_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Dripper(("127.0.0.1", 0), Dripping)) as server, caplog.at_level(logging.WARNING):
        webhook = Webhook(f"http://127.0.0.1:{server.server_address[1]}/hook", "mine")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(webhook.run)
            webhook.tell(notice("error", "node3 is lost"))
            await trio.sleep(5)
            ended_s = trio.current_time()
            nursery.cancel_scope.cancel()
        assert 10 <= trio.current_time() - ended_s < 20
    assert [record.message for record in caplog.records] == [
        "control.webhook_url: messages are not delivered: it took too long as the run ended"
    ]
