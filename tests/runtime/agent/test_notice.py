"""Notices of termination, from real commands and a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trio

from oobleck.errors import ConfigError
from oobleck.job import ControlSpec
from oobleck.runtime.agent.notice import await_notice
from tests.processes import all_to_end, no_new_processes, noted_by
from tests.serving import serving


class Metadata(ThreadingHTTPServer):
    """A metadata server: says 404, then what it is told to say."""

    daemon_threads = True
    answer: bytes | None = None
    asked = 0


class _Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        self.server.asked += 1
        if self.headers["Metadata-Flavor"] != "Google" or self.server.answer is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def metadata_server() -> Iterator[tuple[Metadata, str]]:
    with serving(Metadata(("127.0.0.1", 0), _Handler)) as server:
        yield server, f"http://127.0.0.1:{server.server_address[1]}/preempted"


async def first_notice(control: ControlSpec, within_s: float = 20.0) -> str | None:
    with trio.move_on_after(within_s):
        return await await_notice(control)
    return None


async def test_a_command_is_asked_until_it_succeeds(tmp_path: Path) -> None:
    flag = tmp_path / "taken"
    control = ControlSpec(notice_command=f"cat {flag}", notice_interval_s=0.05)
    assert await first_notice(control, within_s=0.5) is None
    flag.write_text("terminate at noon\n")
    assert await first_notice(control) == "notice of termination: terminate at noon"


async def test_a_command_that_hangs_is_no_notice() -> None:
    assert await first_notice(ControlSpec(notice_command="sleep 60", notice_interval_s=0.05), within_s=0.3) is None


@pytest.mark.parametrize(
    "last",
    [
        pytest.param("wait", id="the shell waits"),
        pytest.param("exit 1", id="the shell has ended"),
    ],
)
async def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path, last: str) -> None:
    noted = tmp_path / "pids"
    command = f"sleep 1000 & echo $! >>{noted}; {last}"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(await_notice, ControlSpec(notice_command=command, notice_interval_s=0.05))
        with trio.fail_after(20):
            while not noted_by(noted):  # noqa: ASYNC110  a process writes it
                await trio.sleep(0.02)
        await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    await all_to_end(noted_by(noted))


async def test_a_command_that_cannot_be_started_for_a_while_is_no_notice_and_asked_afterwards() -> None:
    control = ControlSpec(notice_command="echo at noon", notice_interval_s=0.05)
    with no_new_processes():
        assert await first_notice(control, within_s=0.3) is None
    assert await first_notice(control) == "notice of termination: at noon"


async def test_a_server_is_asked_until_it_says_what_is_waited_for() -> None:
    with metadata_server() as (server, url):
        control = ControlSpec(
            notice_url=url,
            notice_headers={"Metadata-Flavor": "Google"},
            notice_pattern="^TRUE$",
            notice_interval_s=0.05,
        )
        assert await first_notice(control, within_s=0.5) is None
        server.answer = b"FALSE"
        assert await first_notice(control, within_s=0.5) is None
        assert server.asked > 2
        server.answer = b"TRUE"
        assert await first_notice(control) == "notice of termination: TRUE"


async def test_a_server_that_is_not_there_is_no_notice() -> None:
    control = ControlSpec(notice_url="http://127.0.0.1:1/preempted", notice_interval_s=0.05)
    assert await first_notice(control, within_s=0.5) is None


async def test_where_nothing_is_to_be_asked_no_notice_comes() -> None:
    assert await first_notice(ControlSpec(), within_s=0.1) is None


@pytest.mark.parametrize(
    "wrong", [{"notice_url": "file:///etc/passwd"}, {"notice_pattern": "("}, {"notice_interval_s": 0}]
)
def test_what_cannot_be_asked_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ControlSpec(**wrong)
