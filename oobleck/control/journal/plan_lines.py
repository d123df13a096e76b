"""Plans in the journal's file: each as what it changes of the plan before, so that a loss costs as much as it changes.

A file's first plan is whole, and so is each that follows a gap; see `control/plans/plan_delta.py`. Plans of few
pipelines are written as they are: for people.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from oobleck.control.plans import WrongBase, apply_change, change_between
from oobleck.control.protocol import PlanChange
from oobleck.errors import PeerError
from oobleck.planner import ExecutionPlan

from .entries import JournalEntry
from .plan_entries import PlanAdopted

_EMPTY = ExecutionPlan(pipelines=())
_FEW_PIPELINES = 16
"""A plan of no more is a few KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """A plan that was adopted: all of its entry but the plan, and what the plan changes."""

    entry: PlanAdopted
    """Its plan and what it has for each pipeline are left out."""
    base: int | None
    """The generation of the plan before; None where this one is whole."""
    change: PlanChange


JournalLine = JournalEntry | PlanLine
"""What a line of the file may be."""


class PlanPacker:
    """Writes plans, one after the other."""

    def __init__(self) -> None:
        self._base: PlanAdopted | None = None

    def forget(self) -> None:
        """Who reads may lack the plan before: the next one is whole."""
        self._base = None

    def line(self, entry: JournalEntry) -> JournalLine:
        """Return the line for the next entry; O(nodes) for a plan, else O(1)."""
        if not isinstance(entry, PlanAdopted):
            return entry
        base, self._base = self._base, entry
        if len(entry.plan.pipelines) <= _FEW_PIPELINES:
            return entry
        return PlanLine(
            entry=replace(entry, plan=_EMPTY, pipeline_generations=(), schedules=()),
            base=None if base is None else base.generation,
            change=change_between(base, entry),
        )

    def plans(self, entries: Iterable[PlanAdopted]) -> tuple[PlanAdopted | PlanLine, ...]:
        """Return the lines for plans alone."""
        lines = map(self.line, entries)
        return tuple(line for line in lines if isinstance(line, PlanAdopted | PlanLine))


class PlanUnpacker:
    """Reads plans, one after the other."""

    def __init__(self, base: PlanAdopted | None = None) -> None:
        """`base` is the newest plan before the first that is read, where there is one."""
        self._base = base

    def entry(self, line: JournalLine) -> JournalEntry:
        """Return what a line says; O(nodes) for a plan.

        Raises PeerError for a plan that changes another one than the one before.
        """
        if isinstance(line, PlanLine):
            return self._unpack(line)
        if isinstance(line, PlanAdopted):
            self._base = line
        return line

    def plans(self, lines: Iterable[PlanAdopted | PlanLine]) -> tuple[PlanAdopted, ...]:
        """Return what lines about plans alone say. Raises PeerError as `entry` does."""
        entries = map(self.entry, lines)
        return tuple(entry for entry in entries if isinstance(entry, PlanAdopted))

    def _unpack(self, line: PlanLine) -> PlanAdopted:
        base = None if line.base is None else self._base
        if line.base is not None and (base is None or base.generation != line.base):
            found = "none" if base is None else f"that of generation {base.generation}"
            raise PeerError(f"changes the plan of generation {line.base}; the plan before is {found}")
        try:
            plan, pipeline_generations, schedules = apply_change(base, line.change)
        except WrongBase as error:
            raise PeerError(str(error)) from error
        self._base = replace(line.entry, plan=plan, pipeline_generations=pipeline_generations, schedules=schedules)
        return self._base
