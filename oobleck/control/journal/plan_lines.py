"""Plans in the journal's file: each as what it changes of the plan before, so that a loss costs as much as it changes.

A file's first plan is whole, and so is each that follows a gap. Pipelines that stay are named by where they are in the
plan before, in runs; a whole plan names each template once. Plans of few pipelines are written as they are: for people.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from oobleck.errors import ConfigError, PeerError
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate
from oobleck.schedule import ScheduleKind

from .entries import JournalEntry
from .plan_entries import PlanAdopted

__all__ = ["JournalLine", "PlanLine", "PlanPacker", "PlanUnpacker"]

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

Runs = tuple[tuple[int, int], ...]
"""Numbers that follow each other, as (first, how many)."""

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
    templates: tuple[PipelineTemplate, ...]
    """That the plan before lacks."""
    pipelines: tuple[tuple[int, tuple[str, ...]], ...]
    """That the plan before lacks, as (template, nodes). It counts the templates of both."""
    order: Runs
    """The pipelines, by their places among those of the plan before and then these."""
    microbatches: tuple[tuple[int, int], ...]
    """(how many pipelines, microbatches of each)."""
    spares: tuple[str, ...]
    spare_order: Runs
    """As of pipelines."""
    pipeline_generations: tuple[tuple[int, int], ...]
    """(how many pipelines, generation)."""
    schedules: tuple[tuple[int, ScheduleKind], ...]
    """(how many pipelines, schedule)."""


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
        if len(entry.plan.pipelines) <= _FEW_PIPELINES:
            self._base = entry
            return entry
        return self._pack(entry)

    def plans(self, entries: Iterable[PlanAdopted]) -> tuple[PlanAdopted | PlanLine, ...]:
        """Return the lines for plans alone."""
        lines = map(self.line, entries)
        return tuple(line for line in lines if isinstance(line, PlanAdopted | PlanLine))

    def _pack(self, entry: PlanAdopted) -> PlanLine:
        base, self._base = self._base, entry
        before, now = _pipelines_of(base), entry.plan.pipelines
        known = _templates_of(before)
        templates = list(dict.fromkeys((*known, *_templates_of(now))))
        place = {template: index for index, template in enumerate(templates)}
        distinct = {id(each.template): each.template for each in (*before, *now)}
        place_of = {key: place[template] for key, template in distinct.items()}
        added, order = _edits(
            [(place_of[id(each.template)], each.nodes) for each in before],
            [(place_of[id(each.template)], each.nodes) for each in now],
        )
        spares, spare_order = _edits(() if base is None else base.plan.spares, entry.plan.spares)
        return PlanLine(
            entry=replace(entry, plan=_EMPTY, pipeline_generations=(), schedules=()),
            base=None if base is None else base.generation,
            templates=tuple(templates[len(known) :]),
            pipelines=added,
            order=order,
            microbatches=_counted(each.num_microbatches for each in now),
            spares=spares,
            spare_order=spare_order,
            pipeline_generations=_counted(entry.pipeline_generations),
            schedules=_counted(entry.schedules),
        )


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
        before = _pipelines_of(base)
        templates = (*_templates_of(before), *line.templates)
        try:
            known = [
                *((each.template, each.nodes) for each in before),
                *((templates[template], nodes) for template, nodes in line.pipelines),
            ]
            shares = _each(line.microbatches)
            pipelines = tuple(
                before[index]
                if index < len(before) and before[index].num_microbatches == share
                else Pipeline(template=known[index][0], nodes=known[index][1], num_microbatches=share)
                for index, share in zip(_numbers(line.order), shares, strict=True)
            )
            all_spares = (*(() if base is None else base.plan.spares), *line.spares)
            spares = tuple(all_spares[index] for index in _numbers(line.spare_order))
        except (ConfigError, IndexError, ValueError) as error:
            raise PeerError(f"no plan follows from the one before: {error}") from error
        self._base = replace(
            line.entry,
            plan=ExecutionPlan(pipelines=pipelines, spares=spares),
            pipeline_generations=tuple(_each(line.pipeline_generations)),
            schedules=tuple(_each(line.schedules)),
        )
        return self._base


def _pipelines_of(entry: PlanAdopted | None) -> tuple[Pipeline, ...]:
    return () if entry is None else entry.plan.pipelines


def _templates_of(pipelines: Iterable[Pipeline]) -> list[PipelineTemplate]:
    """All templates, in the order in which pipelines name them; thousands share a few."""
    return list(dict.fromkeys({id(each.template): each.template for each in pipelines}.values()))


def _edits(before: Sequence[H], now: Sequence[H]) -> tuple[tuple[H, ...], Runs]:
    """Return what `before` lacks, and where each of `now` is among `before` and then these."""
    places = {item: index for index, item in enumerate(before)}
    added = tuple(dict.fromkeys(item for item in now if item not in places))
    places.update((item, len(before) + index) for index, item in enumerate(added))
    runs: list[tuple[int, int]] = []
    for number in map(places.__getitem__, now):
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return added, tuple(runs)


def _numbers(runs: Runs) -> list[int]:
    return [number for first, count in runs for number in range(first, first + count)]


def _counted(values: Iterable[T]) -> tuple[tuple[int, T], ...]:
    return tuple((len(list(group)), value) for value, group in groupby(values))


def _each(counted: Iterable[tuple[int, T]]) -> list[T]:
    return [value for count, value in counted for _ in range(count)]
