"""Which of several saved states is the newest: not the one that a clock says, where anything better is known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["StateAge", "ages"]

_NAME = re.compile(r"step-(?P<step>\d+)\.(?P<run>[^.]+)\.(?P<generation>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAge:
    """What is known about the age of a saved state."""

    name: str
    saved_at: str
    origin: str | None = None
    """The checkpoint that its run began from."""


def ages(states: Iterable[StateAge]) -> Mapping[str, int]:
    """Number states from the oldest, by name. O(n log n).

    Machines' clocks differ, and are set back. So within a run generations and steps decide, and a run is newer than the
    one that it continues. Clocks order runs alone that have nothing to do with each other.
    """
    known = {state.name: state for state in states}
    places = {name: found for name in known if (found := _NAME.fullmatch(name)) is not None}
    origins: dict[str, str] = {}
    newest: dict[str, str] = {}
    for name, place in places.items():
        run, state = place["run"], known[name]
        newest[run] = max(newest.get(run, ""), state.saved_at)
        if state.origin is not None and (begun := _NAME.fullmatch(state.origin)) is not None:
            origins[run] = begun["run"]

    def key(name: str) -> tuple[str, int, int, int, str]:
        if name not in places:
            return (known[name].saved_at, 0, 0, 0, name)
        chain = _chain(places[name]["run"], origins)
        at = max(newest.get(run, "") for run in chain)
        return (at, len(chain), int(places[name]["generation"]), int(places[name]["step"]), name)

    return {name: age for age, name in enumerate(sorted(known, key=key))}


def _chain(run: str, origins: Mapping[str, str]) -> tuple[str, ...]:
    """A run, and those that it continues, one after the other."""
    chain = [run]
    while (before := origins.get(chain[-1])) is not None and before not in chain:
        chain.append(before)
    return tuple(chain)
