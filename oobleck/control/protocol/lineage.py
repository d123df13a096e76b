"""Which of several saved states is the newest. Clocks have a say only between runs that do not continue each other.

Of one run, a state of a later generation is newer, then that of a later step. A run that continues from another one's
checkpoint is newer than all of that one, whose master has ended by then. What is left are runs of one tag that begin
from nothing: these are compared by when they saved last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from .manifest import generation_of, run_of

Age = tuple[str, str, int, str, str, int, int, str]
"""Greater for the newer state."""


class Aged(Protocol):
    """A saved state, as far as its age is concerned."""

    @property
    def name(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def saved_at(self) -> str: ...
    @property
    def origin(self) -> str | None: ...


def ages(states: Iterable[Aged]) -> Mapping[str, Age]:
    """Return the age of each state, by its name. O(n·d), with d runs that continue from each other."""
    listed = list(states)
    saved_at: dict[str, str] = {}
    before: dict[str, str] = {}
    for each in listed:
        saved_at[each.run] = max(saved_at.get(each.run, ""), each.saved_at)
        if each.origin is not None:
            before[each.run] = run_of(each.origin)
    lines = {run: _line(run, before) for run in saved_at}
    last_of_root: dict[str, str] = {}
    for run, line in lines.items():
        last_of_root[line[-1]] = max(last_of_root.get(line[-1], ""), saved_at[run])
    found: dict[str, Age] = {}
    for each in listed:
        *ancestors, root = lines[each.run]
        run_age = (last_of_root[root], root, len(ancestors), saved_at[each.run], each.run)
        found[each.name] = (*run_age, generation_of(each.name), each.step, each.name)
    return found


def _line(run: str, before: Mapping[str, str]) -> list[str]:
    """A run, the one that it continues from, and so on; a damaged manifest may close a circle."""
    line = [run]
    while (run := before.get(run, "")) and run not in line:
        line.append(run)
    return line
