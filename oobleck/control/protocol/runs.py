"""Numbers that follow each other, in few words: of thousands of nodes, a message names the first and how many.

Nodes are named so by their places in a list that both sides have, mostly the nodes of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Runs = tuple[tuple[int, int], ...]
"""Numbers that follow each other, as (first, how many)."""

Names = tuple[tuple[int, int] | int | str, ...]
"""Names in their order, by their places in a list: as a run where these follow each other, else alone. Names that the
list lacks are there as they are."""


def runs_of(numbers: Iterable[int]) -> Runs:
    """Put numbers that follow each other together."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return tuple(runs)


def numbers_in(runs: Runs) -> list[int]:
    """Undo `runs_of`."""
    return [number for first, count in runs for number in range(first, first + count)]


def named(names: Iterable[str], places: Mapping[str, int]) -> Names:
    """Say names by their places in a list, where it has them."""
    said: list[tuple[int, int] | int | str] = []
    follows = -1
    for name in names:
        place = places.get(name)
        if place is None:
            said.append(name)
            follows = -1
            continue
        if place != follows:
            said.append(place)
        else:
            newest = said[-1]
            said[-1] = (newest[0], newest[1] + 1) if isinstance(newest, tuple) else (place - 1, 2)
        follows = place + 1
    return tuple(said)


def names_in(said: Names, known: Sequence[str]) -> tuple[str, ...]:
    """Undo `named`, with the list. Raises ValueError for a run of places that it does not have."""
    names: list[str] = []
    for each in said:
        if isinstance(each, str):
            names.append(each)
            continue
        first, count = each if isinstance(each, tuple) else (each, 1)
        if first < 0 or count < 1 or first + count > len(known):
            raise ValueError(f"{count} names from place {first}, of {len(known)} that are known")
        names.extend(known[first : first + count])
    return tuple(names)
