"""A process that ends with the one that started it."""

from __future__ import annotations

import signal
import subprocess
import sys

CODE = """
import time
from oobleck.cli.up.command import end_with_stdin
end_with_stdin()
print("lives", flush=True)
time.sleep({seconds})
"""


def started(stdin: int, *, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CODE.format(seconds=seconds)]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE)


def test_the_end_of_a_pipe_is_a_sigterm_and_what_is_written_to_it_is_nothing():
    with started(subprocess.PIPE, seconds=60) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"lives\n"
        process.stdin.write(b"words\n")
        process.stdin.flush()
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(timeout=30) == -signal.SIGTERM


def test_the_program_that_started_it_can_interrupt_it_from_a_shells_background():
    ignoring = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as processes that it starts have it, too
    try:
        with started(subprocess.PIPE, seconds=60) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"lives\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == -signal.SIGINT, "as Python ends by a KeyboardInterrupt"
    finally:
        signal.signal(signal.SIGINT, ignoring)


def test_without_a_pipe_it_stays():
    with started(subprocess.DEVNULL, seconds=0.2) as process:
        assert process.wait(timeout=30) == 0
