"""Plans in the journal's file, each as a change of the plan before: a loss takes as much room as what it changes.

A file's first plan is whole, and so is each that follows a gap; see `control/plans/plan_delta.py`. Plans of few
pipelines are always written whole, for people.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """An adopted plan, as its entry without the plan, and the change."""

    entry: PlanAdopted
    """Without its plan, and its values for each pipeline."""
    base: int | None
    """The generation of the plan that is changed; None where this one is whole."""
    change: PlanChange


JournalLine = JournalEntry | PlanLine


class PlanPacker:
    """Writes plans, one after the other."""

    def __init__(self) -> None:
        self._base: PlanAdopted | None = None

    def forget(self) -> None:
        """Make the next plan whole: a reader may lack the one before."""
        self._base = None

    def line(self, entry: JournalEntry) -> JournalLine:
        """Return the line for the next entry; O(nodes) for a plan, else O(1)."""
        if not isinstance(entry, PlanAdopted):
            return entry
        # A plan that is written whole is the base of the next one as well.
        base, self._base = self._base, entry
        if len(entry.plan.pipelines) <= _FEW_PIPELINES:
            return entry
        return PlanLine(
            entry=replace(entry, plan=_EMPTY, pipeline_generations=(), schedules=()),
            base=None if base is None else base.generation,
            change=change_between(base, entry),
        )

    def plans(self, entries: Iterable[PlanAdopted]) -> tuple[PlanAdopted | PlanLine, ...]:
        lines = map(self.line, entries)
        return tuple(line for line in lines if isinstance(line, PlanAdopted | PlanLine))


class PlanUnpacker:
    """Reads plans, one after the other."""

    def __init__(self, base: PlanAdopted | None = None) -> None:
        """`base` is the newest plan before the first that is read, where there is one."""
        self._base = base

    def entry(self, line: JournalLine) -> JournalEntry:
        """Return a line's entry; O(nodes) for a plan. Raises PeerError for a change of another plan than the last."""
        if isinstance(line, PlanLine):
            return self._unpack(line)
        if isinstance(line, PlanAdopted):
            self._base = line
        return line

    def plans(self, lines: Iterable[PlanAdopted | PlanLine]) -> tuple[PlanAdopted, ...]:
        """Return the entries of lines for plans alone. Raises PeerError as `entry` does."""
        entries = map(self.entry, lines)
        return tuple(entry for entry in entries if isinstance(entry, PlanAdopted))

    def _unpack(self, line: PlanLine) -> PlanAdopted:
        base = None if line.base is None else self._base
        # Entries may be missing: a change of a plan that was never read must not be applied to another plan.
        if line.base is not None and (base is None or base.generation != line.base):
            found = "none" if base is None else f"that of generation {base.generation}"
            raise PeerError(f"changes the plan of generation {line.base}; the plan before is {found}")
        try:
            plan, pipeline_generations, schedules = apply_change(base, line.change)
        except WrongBase as error:
            raise PeerError(str(error)) from error
        self._base = replace(line.entry, plan=plan, pipeline_generations=pipeline_generations, schedules=schedules)
        return self._base
