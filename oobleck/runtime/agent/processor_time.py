"""How much processor time a process has used, with all that descend from it: compilers are processes of their own.

Linux's /proc only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TIMES = slice(11, 15)
"""User and system time, its own and that of children that it has waited for; counted from the state's field."""


def processor_s(pid: int) -> float:
    """Return the seconds of processor time that a process and its descendants have used; 0 when it is gone."""
    return sum(map(_own_s, _family(pid)))


def _own_s(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0.0
    words = stat.rpartition(b")")[2].split()  # its name, in parentheses, may be anything
    return sum(map(int, words[_TIMES])) / _TICKS_PER_S


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in _tasks(pid):
        with suppress(OSError):  # a kernel may lack this file; then only children that have ended are counted
            for child in Path(f"/proc/{pid}/task/{task}/children").read_bytes().split():
                yield from _family(int(child))


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
