"""Numbers that follow each other, in few words: of thousands of nodes, a message names the first and how many."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Runs", "numbers_in", "runs_of"]

Runs = tuple[tuple[int, int], ...]
"""Numbers that follow each other, as (first, how many)."""


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
