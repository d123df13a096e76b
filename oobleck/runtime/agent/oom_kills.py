"""Tells a process that the kernel has killed for lack of memory from one that somebody else has killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

from oobleck.control.protocol import Killed, ProcessEnd
from oobleck.host.machine import num_oom_kills

from .fork_client import ForkedProcess


class OomKills:
    """Explains ends by the count that the agent's cgroup keeps; its workers and ranks are in the same one.

    Each kill of the kernel explains one end. Both are SIGKILL, and only the count tells them apart.
    """

    def __init__(self, count: Callable[[], int] = num_oom_kills) -> None:
        self._count = count
        self._num_explained = count()

    def explain(self, process: ForkedProcess) -> ProcessEnd:
        """Return how a process has ended, with what the kernel says of it; the same whenever it is asked."""
        process.end = self._explained(process.end)
        return process.end

    def _explained(self, end: ProcessEnd) -> ProcessEnd:
        if end != Killed(signal=signal.SIGKILL):
            return end
        if self._count() <= self._num_explained:
            return end
        self._num_explained += 1
        return replace(end, is_out_of_memory=True)
