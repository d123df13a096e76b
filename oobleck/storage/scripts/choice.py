"""Chooses the saved state that all ranks load, and the sources of its parts. Pure: the same facts give the same choice.

A state is usable only if every rank known to save has saved it, and no piece of a sharded tensor is missing. In memory,
the newest step that all ranks have is in one of two slots: a rank that saves has reached the end of a step, which all
others have begun, so no rank is more than one save behind, and the older slot has that save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .part import PartNote
from .shards import is_covered


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A part that the rank `viewer` of this start can read."""

    viewer: int
    place: Literal["memory", "disk"]
    note: PartNote


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    name: str
    place: Literal["memory", "disk"]
    notes: Mapping[int, PartNote]
    """Keyed by the rank that saved the part."""
    viewers: Mapping[int, tuple[int, ...]]
    """The ranks that can read a part now, keyed by the rank that saved it."""

    @property
    def note(self) -> PartNote:
        """The note of one part, for the facts that all parts share."""
        return self.notes[min(self.notes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LostState:
    """States were saved, but none is whole any more."""

    problem: str


@dataclass(frozen=True, slots=True)
class Source:
    """The part that the rank `saver` saved, read by the rank `reader`."""

    saver: int
    reader: int


def choose(holdings: Sequence[Holding]) -> Chosen | LostState | None:
    """Return the newest whole state; None if the ranks never completed a save."""
    whole: list[Chosen] = []
    for place in ("memory", "disk"):
        here = [holding for holding in holdings if holding.place == place]
        # Parts of different starts are never mixed: a step may have been computed twice, and differently.
        for start in sorted({holding.note.start for holding in here}):
            whole += _whole([holding for holding in here if holding.note.start == start])
    if whole:
        # A state that is in both places is read from memory, which is faster.
        return max(whole, key=lambda each: (each.note.age, each.place == "memory"))
    # A rank saves another step only after all others have saved the one before. So a whole state existed, and is lost.
    if any(holding.note.number > 1 for holding in holdings):
        return LostState(problem=_missing(holdings))
    return None


def _whole(holdings: Sequence[Holding]) -> list[Chosen]:
    savers = {holding.note.rank for holding in holdings}
    whole = []
    for name in sorted({holding.note.name for holding in holdings}):
        parts = [holding for holding in holdings if holding.note.name == name]
        notes = {holding.note.rank: holding.note for holding in parts}
        shardings = parts[0].note.shardings
        if notes.keys() != savers or not all(is_covered(each, notes) for each in shardings):
            continue
        viewers = {rank: tuple(sorted({each.viewer for each in parts if each.note.rank == rank})) for rank in notes}
        whole.append(Chosen(name=name, place=parts[0].place, notes=notes, viewers=viewers))
    return whole


def _missing(holdings: Sequence[Holding]) -> str:
    newest = max((holding.note for holding in holdings), key=lambda note: note.age)
    there = {holding.note.rank for holding in holdings if holding.note.name == newest.name}
    missing = sorted(set(range(newest.world_size)) - there)
    listed = f"{', '.join(map(str, missing[:8]))}{', …' if len(missing) > 8 else ''}"
    return (
        f"no saved state is whole: of step {newest.step} of {newest.world_size} ranks, the parts of rank "
        f"{listed or '(none)'} are neither in the memory of a remaining node nor on disk"
    )


def sources(
    chosen: Chosen, *, rank: int, world_size: int
) -> tuple[Source, Mapping[tuple[int, tuple[int, ...]], Source]]:
    """Return a rank's sources of the values, and of each piece, keyed by the sharding's index and the piece.

    A rank prefers its own part, then one that it can read itself, then the lowest rank's.
    """
    # With another number of ranks, no rank has a part of its own.
    is_same = chosen.note.world_size == world_size
    values = _nearest(chosen, chosen.notes, rank, is_same=is_same)
    pieces: dict[tuple[int, tuple[int, ...]], Source] = {}
    for number, sharding in enumerate(chosen.note.shardings):
        savers: dict[tuple[int, ...], list[int]] = {}
        for saver in sorted(chosen.notes):
            savers.setdefault(sharding.piece(saver), []).append(saver)
        for piece, ranks in savers.items():
            pieces[number, piece] = _nearest(chosen, ranks, rank, is_same=is_same)
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
