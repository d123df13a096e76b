"""Which process is meant: its number, and when it began; for numbers are given to other processes in time.

Standard library and Linux's /proc only. `agent_dir` has the same comparison as a shell's, for nodes.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine, and no other that ever has the same number."""

    pid: int
    started_ticks: int
    """When it began, in the kernel's ticks since the machine did (`proc(5)`, field 22 of `stat`)."""
    boot: str
    """Which start of the machine those count from."""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this number now; None when there is none."""
        found = _look(pid)
        return cls(pid, found[1], _boot()) if found is not None else None

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """Read what `str` wrote; None where it is something else."""
        words = text.split()
        if len(words) != 3 or not (words[0].isdecimal() and words[1].isdecimal()):
            return None
        return cls(int(words[0]), int(words[1]), words[2])

    @classmethod
    def read(cls, path: Path) -> ProcessId | None:
        """Read a file that holds one; None where there is no such file, or it holds something else."""
        try:
            return cls.parse(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def __str__(self) -> str:
        return f"{self.pid} {self.started_ticks} {self.boot}"

    @property
    def is_of_this_boot(self) -> bool:
        """Whether it was started on this machine, since its last restart."""
        return _boot() == self.boot

    @property
    def lives(self) -> bool:
        """Whether it lives; one that has ended, and that was not waited for, does not."""
        found = _look(self.pid)
        return found is not None and found[0] != "Z" and found[1] == self.started_ticks and self.is_of_this_boot

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped it, by a signal or as a debugger does."""
        found = _look(self.pid)
        return found is not None and found[0] in "Tt" and found[1] == self.started_ticks

    def send(self, number: int) -> bool:
        """Send it a signal; False when it is gone. Another process that has its number now is left alone.

        Raises PermissionError.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError:  # a kernel without them: between the look and the signal the number might change hands
            return self._signal_by_number(number)
        try:  # the descriptor holds on to one process: if it is ours now, it still is when the signal is sent
            if not self.lives:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _signal_by_number(self, number: int) -> bool:
        with suppress(ProcessLookupError):
            if self.lives:
                os.kill(self.pid, number)
                return True
        return False


def _look(pid: int) -> tuple[str, int] | None:
    """The state of a process, and when it began; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    words = stat.rpartition(b")")[2].split()  # its name, in parentheses, may be anything
    return words[0].decode(), int(words[19])


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
