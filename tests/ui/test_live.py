"""The dashboard and the lines where they live: on a real pseudo-terminal, in processes of their own."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from oobleck.ui.live import LineFormatter, LineLog
from tests.control.journals import committed, job_started, run_with_a_loss

FEEDER = Path(__file__).with_name("feed_dashboard.py")
ENTER, LEAVE, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A process on a pseudo-terminal, and everything that it wrote there."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24, term: str = "xterm-256color") -> None:
        self._master, slave = pty.openpty()
        self.resize(columns, lines)
        self.settings = termios.tcgetattr(self._master)
        root = Path(__file__).parents[2]
        environment = os.environ | {"TERM": term, "PYTHONPATH": str(root), "COLUMNS": "", "LINES": ""}
        command = [sys.executable, str(FEEDER), *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            # A terminal has a foreground only as somebody's controlling one.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self.output = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read_until(self, *, text: bytes = b"", timeout_s: float = 60.0) -> bytes:
        """Read until `text` comes, or to the end where there is none to wait for."""
        deadline = time.monotonic() + timeout_s
        start = len(self.output)
        while not (text and text in self.output[start:]):
            assert time.monotonic() < deadline, self.output[start:].decode(errors="replace")
            try:
                chunk = os.read(self._master, 65536)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            except OSError:  # the other side is closed
                break
            self.output += chunk
        return self.output[start:]

    def end(self) -> int:
        self.read_until()
        return self.process.wait(timeout=10)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def settings_now(self) -> list[object]:
        return termios.tcgetattr(self._master)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(request):
    opened: list[Terminal] = []

    def open_terminal(*arguments: str, **options) -> Terminal:
        opened.append(Terminal(*arguments, **options))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def test_the_dashboard_leaves_the_terminal_whole_and_the_last_state_visible(terminal):
    screen = terminal("--speed", "40")
    assert screen.end() == 0
    assert screen.output.count(ENTER) == screen.output.count(LEAVE) == 1
    after = screen.output.partition(LEAVE)[2]
    assert SHOW_CURSOR in screen.output
    assert b"step 120/120" in after.replace(b"\x1b[1m", b"").replace(b"\x1b[2m", b"").replace(b"\x1b[0m", b"")
    assert screen.settings_now() == screen.settings


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_dashboard_and_restores_the_terminal(terminal, number):
    screen = terminal("--speed", "4")
    screen.read_until(text=b"layers 0-3")
    screen.process.send_signal(number)
    assert screen.end() == 128 + number
    assert screen.output.count(LEAVE) == 1
    assert screen.output.rindex(SHOW_CURSOR) > screen.output.rindex(b"\x1b[?25l")
    assert b"Traceback" not in screen.output


def test_the_dashboard_follows_the_terminals_size(terminal):
    screen = terminal("--speed", "2")
    screen.read_until(text=b"layers 0-3")
    seen = len(screen.output)
    screen.resize(40, 20)
    screen.process.send_signal(signal.SIGWINCH)
    screen.read_until(text=b"\x1b[H")
    while screen.output.count(b"\x1b[H", seen) < 4:
        screen.read_until(text=b"\x1b[H")
    frame = screen.output.split(b"\x1b[H")[-2].decode()
    rules = [line.count("─") for line in frame.split("\n") if "Events" in line]
    assert rules == [40 - len("─ Events ") + 1]


@pytest.mark.slow
def test_a_stopped_terminal_does_not_hold_up_the_run(terminal, tmp_path):
    """Nobody reads, so writing blocks; the feeder's tasks must go on and end all the same."""
    report = tmp_path / "report"
    screen = terminal("--speed", "20", "--nodes", "64", "--report", str(report), columns=200, lines=60)
    deadline = time.monotonic() + 60
    while not report.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(screen.output) == 0
    assert screen.end() == 0
    assert float(report.read_text()) < 1.0


@pytest.mark.parametrize("options", [{"term": "dumb"}, {}])
def test_a_terminal_that_cannot_or_shall_not_draw_gets_lines(terminal, options):
    screen = terminal("--speed", "40", *(() if options else ("--plain",)), **options)
    assert screen.end() == 0
    assert ENTER not in screen.output
    assert b"[0:00:26] node3 lost; same pipelines" in screen.output


def test_without_a_terminal_lines_are_written_whole():
    environment = os.environ | {"PYTHONPATH": str(FEEDER.parents[2])}
    done = subprocess.run(
        [sys.executable, str(FEEDER), "--speed", "40"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    formatter = LineFormatter()
    expected = [line for entry in run_with_a_loss() for line in formatter.apply(entry)]
    assert done.stdout.splitlines() == expected


def test_lines_that_nobody_takes_are_dropped_and_counted():
    log = LineLog(LineFormatter(steps_per_s=1e9))
    log.apply(job_started(("node0",), max_steps=20_000))
    for step in range(1, 12_001):
        log.apply(committed(float(step), step))
    lines = log.take()
    assert len(lines) == 10_001
    assert lines[0] == "(2002 lines left out: the output was too slow)"
    assert log.take() == []


def test_what_another_master_wrote_is_known_and_not_written_again():
    formatter = LineFormatter()
    formatter.apply(job_started(("node0",), max_steps=7))
    log = LineLog(formatter)
    assert log.take() == []
    log.apply(committed(5.0, 3))
    (line,) = log.take()
    assert "step 3/7" in line


def test_keys_ask_the_run_once_they_are_confirmed_and_its_answer_is_shown(terminal):
    screen = terminal("--keys", columns=100, lines=30)
    screen.read_until(text=b"q\x1b[0m\x1b[2m quit")
    screen.type("k1\r")
    screen.read_until(text=b"kill node1 at once")
    screen.type("y")
    screen.read_until(text=b"killed node1")
    screen.type("kx\x7f\ry")
    screen.read_until(text=b"node0 stays")
    screen.type("?")
    screen.read_until(text=b"Signs and words")
    screen.type("xq")
    assert screen.end() == 0
    asked = [line for line in screen.output.decode().splitlines() if line.startswith("asked: ")]
    assert asked == ["asked: kill node1", "asked: kill node0"]
    assert screen.output.count(LEAVE) == 1
    assert screen.settings_now() == screen.settings


def test_a_process_that_is_suspended_leaves_the_terminal_as_it_was_and_comes_back(terminal):
    screen = terminal("--keys", columns=100, lines=30)
    screen.read_until(text=b"q\x1b[0m\x1b[2m quit")
    assert screen.settings_now() != screen.settings, "keys are read one by one"
    screen.type("\x1a")
    screen.read_until(text=LEAVE)
    while psutil.Process(screen.process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.02)
    assert screen.settings_now() == screen.settings
    screen.process.send_signal(signal.SIGCONT)
    screen.read_until(text=ENTER)
    screen.read_until(text=b"q\x1b[0m\x1b[2m quit")
    screen.type("q")
    assert screen.end() == 0
    assert screen.settings_now() == screen.settings


@pytest.mark.slow
def test_a_process_group_that_is_killed_leaves_the_terminal_as_it_was(terminal):
    screen = terminal("--keys", columns=100, lines=30)
    screen.read_until(text=b"q\x1b[0m\x1b[2m quit")
    os.killpg(screen.process.pid, signal.SIGKILL)
    screen.read_until(text=LEAVE)
    screen.read_until(text=SHOW_CURSOR)
    screen.process.wait(timeout=10)
    assert screen.settings_now() == screen.settings
