"""What tests ask of processes that may end meanwhile, and times at which none can be made."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import trio

__all__ = ["all_to_end", "lives", "no_new_processes", "noted_by", "words_of"]


def words_of(process: psutil.Process) -> list[str]:
    """The words of a process's command line; none of one that has ended, be it reaped or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def noted_by(file: Path) -> list[int]:
    """The pids that a command has written to a file so far, each with its line's end."""
    text = file.read_text() if file.exists() else ""
    return [int(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def lives(pid: int) -> bool:
    """Whether a process is there and has not ended, be it reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def all_to_end(pids: list[int], within_s: float = 5.0) -> None:
    """Wait until processes have ended; kill those that have not, and fail then."""
    deadline_s = time.monotonic() + within_s
    while living := [pid for pid in pids if lives(pid)]:
        if time.monotonic() > deadline_s:
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"still there: {living}")
        await trio.sleep(0.02)


@contextmanager
def no_new_processes() -> Iterator[None]:
    """This process has no descriptor left, so it cannot make the pipes to another one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those that are open stay
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
