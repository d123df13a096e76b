"""Which saved state all ranks load, and from whom each gets what. Pure: all ranks decide the same from the same facts.

A state is used only where every rank that saves has saved it, as far as it can be seen, and where no piece of what is
sharded is missing. In memory the newest step that all ranks have is one of two: a rank that saves has come to the end
of a step, which all others have begun; so nobody is further behind than one save, and the older slot has that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .part import PartNote
from .shards import is_covered


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A part that a rank of this start can read."""

    viewer: int
    place: Literal["memory", "disk"]
    note: PartNote


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The state to load."""

    name: str
    place: Literal["memory", "disk"]
    notes: Mapping[int, PartNote]
    """By the rank that saved it."""
    viewers: Mapping[int, tuple[int, ...]]
    """By the rank that saved it: those that can read its part now."""

    @property
    def note(self) -> PartNote:
        """Of any part: what is the same in all."""
        return self.notes[min(self.notes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LostState:
    """States were saved, and none is whole any more."""

    problem: str


@dataclass(frozen=True, slots=True)
class Source:
    """The part to read, by the rank that saved it, and the rank that reads it."""

    saver: int
    reader: int


def choose(holdings: Sequence[Holding]) -> Chosen | LostState | None:
    """Return the newest state that is whole; None where nothing was ever saved by all."""
    found: list[Chosen] = []
    for place in ("memory", "disk"):
        here = [holding for holding in holdings if holding.place == place]
        for start in sorted({holding.note.start for holding in here}):
            found += _whole([holding for holding in here if holding.note.start == start])
    if found:
        return max(found, key=lambda each: (each.note.age, each.place == "memory"))
    if any(holding.note.number > 1 for holding in holdings):
        return LostState(problem=_missing(holdings))
    return None


def _whole(holdings: Sequence[Holding]) -> list[Chosen]:
    """The states of one start in one place that are whole."""
    savers = {holding.note.rank for holding in holdings}
    found = []
    for name in sorted({holding.note.name for holding in holdings}):
        parts = [holding for holding in holdings if holding.note.name == name]
        notes = {holding.note.rank: holding.note for holding in parts}
        shardings = parts[0].note.shardings
        if notes.keys() != savers or not all(is_covered(each, notes) for each in shardings):
            continue
        viewers = {rank: tuple(sorted({each.viewer for each in parts if each.note.rank == rank})) for rank in notes}
        found.append(Chosen(name=name, place=parts[0].place, notes=notes, viewers=viewers))
    return found


def _missing(holdings: Sequence[Holding]) -> str:
    """What of the newest state is not there."""
    newest = max((holding.note for holding in holdings), key=lambda note: note.age)
    there = {holding.note.rank for holding in holdings if holding.note.name == newest.name}
    missing = sorted(set(range(newest.world_size)) - there)
    listed = f"{', '.join(map(str, missing[:8]))}{', …' if len(missing) > 8 else ''}"
    return (
        f"no saved state is whole: of step {newest.step}, saved by {newest.world_size} ranks, those of rank "
        f"{listed or '(none)'} can be found neither in the memory of a node that is left nor on disk"
    )


def sources(
    chosen: Chosen, *, rank: int, world_size: int
) -> tuple[Source, Mapping[tuple[int, tuple[int, ...]], Source]]:
    """Where a rank gets the values from, and each piece of what is sharded, by the sharding's number and the piece.

    Its own part is preferred, then one that it can read itself, then that of the lowest rank.
    """
    is_same = chosen.note.world_size == world_size
    values = _nearest(chosen, chosen.notes, rank, is_same=is_same)
    pieces: dict[tuple[int, tuple[int, ...]], Source] = {}
    for number, sharding in enumerate(chosen.note.shardings):
        savers: dict[tuple[int, ...], list[int]] = {}
        for saver in sorted(chosen.notes):
            savers.setdefault(sharding.piece(saver), []).append(saver)
        for piece, those in savers.items():
            pieces[number, piece] = _nearest(chosen, those, rank, is_same=is_same)
    return values, pieces


def _nearest(chosen: Chosen, savers: Sequence[int] | Mapping[int, PartNote], rank: int, *, is_same: bool) -> Source:
    readable = [saver for saver in savers if rank in chosen.viewers[saver]]
    if is_same and rank in readable:
        return Source(rank, rank)
    if is_same and rank in savers:
        return Source(rank, min(chosen.viewers[rank]))
    if readable:
        return Source(min(readable), rank)
    saver = min(savers)
    return Source(saver, min(chosen.viewers[saver]))
