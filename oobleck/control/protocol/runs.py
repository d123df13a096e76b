"""Consecutive numbers in little room: for thousands of nodes, a message has the first and how many.

Such numbers stand for nodes by their places in a list that both sides have, mostly the nodes of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Runs = tuple[tuple[int, int], ...]
"""Consecutive numbers, as (first, how many)."""

Names = tuple[tuple[int, int] | int | str, ...]
"""Names in order, by their places in a list: consecutive places as a run, others alone. Names that the list lacks stand
for themselves."""


def runs_of(numbers: Iterable[int]) -> Runs:
    """Group consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return tuple(runs)


def numbers_in(runs: Runs) -> list[int]:
    return [number for first, count in runs for number in range(first, first + count)]


def named(names: Iterable[str], places: Mapping[str, int]) -> Names:
    """Replace names by their places in a list, where it has them."""
    placed: list[tuple[int, int] | int | str] = []
    follows = -1
    for name in names:
        place = places.get(name)
        # A node that joined after the list was made; a run does not continue past it.
        if place is None:
            placed.append(name)
            follows = -1
            continue
        if place != follows:
            placed.append(place)
        else:
            newest = placed[-1]
            placed[-1] = (newest[0], newest[1] + 1) if isinstance(newest, tuple) else (place - 1, 2)
        follows = place + 1
    return tuple(placed)


def names_in(placed: Names, known: Sequence[str]) -> tuple[str, ...]:
    """Undo `named`, with the list. Raises ValueError for places that the list lacks."""
    names: list[str] = []
    for each in placed:
        if isinstance(each, str):
            names.append(each)
            continue
        first, count = each if isinstance(each, tuple) else (each, 1)
        # A negative index would count from the list's end, and name another node.
        if first < 0 or count < 1 or first + count > len(known):
            raise ValueError(f"{count} names from place {first}, of {len(known)} that are known")
        names.extend(known[first : first + count])
    return tuple(names)
