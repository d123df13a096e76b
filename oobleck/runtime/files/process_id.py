"""The identity of a process: its pid and its start, because the kernel gives a pid to other processes in time.

`agent_dir` makes the same comparison in shell commands for nodes.
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
    """A process of this machine, distinct from all others that ever have its pid."""

    pid: int
    started_ticks: int
    """Its start in the kernel's ticks since boot (`proc(5)`, field 22 of `stat`)."""
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the process that has this pid now; None if there is none."""
        fields = stat_fields(pid)
        return cls(pid, int(fields[19]), _boot()) if fields else None

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """Parse the output of `str`; None for any other text."""
        words = text.split()
        if len(words) != 3 or not (words[0].isdecimal() and words[1].isdecimal()):
            return None
        return cls(int(words[0]), int(words[1]), words[2])

    @classmethod
    def read(cls, path: Path) -> ProcessId | None:
        """Read a file that `str` was written to; None if it does not exist or has other content."""
        try:
            return cls.parse(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def __str__(self) -> str:
        return f"{self.pid} {self.started_ticks} {self.boot}"

    @property
    def is_of_this_boot(self) -> bool:
        # Ticks and pids begin again with each boot.
        return _boot() == self.boot

    @property
    def lives(self) -> bool:
        """Whether it lives; a zombie does not."""
        return self._state not in ("", "Z") and self.is_of_this_boot

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended and not been waited for."""
        return self._state == "Z" and self.is_of_this_boot

    @property
    def is_stopped(self) -> bool:
        return self._state in ("T", "t")

    @property
    def _state(self) -> str:
        fields = stat_fields(self.pid)
        return fields[0] if fields and int(fields[19]) == self.started_ticks else ""

    def send(self, number: int) -> bool:
        """Send it a signal; False if it is gone, even if another process has its pid now. Raises PermissionError."""
        try:
            # A pidfd stays with one process, so the check below still holds when the signal is sent.
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError:  # an old kernel; another process might get the pid between the check and the signal
            with suppress(ProcessLookupError):
                if self.lives:
                    os.kill(self.pid, number)
                    return True
            return False
        try:
            if not self.lives:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat (`proc(5)`) from its state, field 3, on; none if there is no process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return stat.rpartition(b")")[2].decode().split()  # before it is the name, which may contain anything


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
