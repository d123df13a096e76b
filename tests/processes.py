"""What tests ask of processes that may end meanwhile."""

from __future__ import annotations

import psutil

__all__ = ["words_of"]


def words_of(process: psutil.Process) -> list[str]:
    """The words of a process's command line; none of one that has ended, be it reaped or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
