"""A process, and those that it has started in its group."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def signal_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to all that is left of the group of a process that was started as its leader; kill it by default.

    Until the leader is reaped, its number stays that of the group, even if only its children are left.
    """
    with suppress(ProcessLookupError, PermissionError):  # a command of sudo's may be another user's by now
        os.killpg(pid, number)
