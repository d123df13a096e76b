"""A plan as the change of another one, and back: `rebuild(base, difference(base, plan)) == plan`, for any two plans.

What stays is named by where it is in the base, in runs; so a loss costs as many bytes as it changes pipelines, and a
plan without a base names each template once. A digest of the plan that has to come out goes along: whoever has another
base, or has rebuilt it wrongly, finds out before it acts on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from oobleck.control.protocol import NewPipeline, OrderedPlan, PartialStep, PlanDelta, Runs
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate

from .sections import committed_after, num_sections_of

__all__ = ["WrongBase", "difference", "numbers_in", "rebuild", "runs_of"]

S = TypeVar("S")
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class WrongBase(Exception):
    """A plan cannot be rebuilt from the one that is at hand."""


def difference(base: OrderedPlan | None, ordered: OrderedPlan) -> PlanDelta:
    """Say what changes from `base` to `ordered`; all of it where there is no base. O(nodes)."""
    pipelines, before = ordered.plan.pipelines, () if base is None else base.plan.pipelines
    known = _templates_of(before)
    templates = tuple(dict.fromkeys([*known, *_templates_of(pipelines)]))
    number_of = {
        id(each): templates.index(each)
        for each in {id(one.template): one.template for one in (*before, *pipelines)}.values()
    }
    added, order = _edits(
        [(number_of[id(each.template)], each.nodes) for each in before],
        [(number_of[id(each.template)], each.nodes) for each in pipelines],
    )
    origins = numbers_in(order)
    spares, spare_order = _edits(() if base is None else base.plan.spares, ordered.plan.spares)
    kept = [before[origin] if origin < len(before) else None for origin in origins]
    return PlanDelta(
        base=None if base is None else base.id,
        digest=ordered.id.digest,
        templates=templates[len(known) :],
        pipelines=tuple(NewPipeline(template=template, nodes=nodes) for template, nodes in added),
        order=order,
        shares=_counted(
            now.num_microbatches - (0 if then is None else then.num_microbatches)
            for now, then in zip(pipelines, kept, strict=True)
        ),
        spares=spares,
        spare_order=spare_order,
        pipeline_generations=_counted(
            _changed(ordered.pipeline_generations, () if base is None else base.pipeline_generations, origins, same=0)
        ),
        schedules=_counted(_changed(ordered.schedules, () if base is None else base.schedules, origins, same=None)),
        boundary=ordered.boundary,
        num_sections=ordered.num_sections,
        loss=ordered.partial.loss,
        section=(ordered.partial.generation, ordered.partial.number),
        committed=_committed(base, ordered),
    )


def rebuild(base: OrderedPlan | None, delta: PlanDelta, generation: int) -> OrderedPlan:
    """Return the plan of `generation` that a delta makes of its base; O(nodes). Raises WrongBase."""
    if delta.base is None:
        base = None
    elif base is None or base.id != delta.base:
        found = "none" if base is None else f"{base.id.generation} ({base.id.digest})"
        raise WrongBase(
            f"generation {generation} changes that of {delta.base.generation} ({delta.base.digest}), not {found}"
        )
    before = () if base is None else base.plan.pipelines
    templates = (*_templates_of(before), *delta.templates)
    new = [(templates[each.template], each.nodes, 0) for each in delta.pipelines]
    origins = numbers_in(delta.order)
    pipelines = tuple(
        _pipeline(before[origin], more)
        if origin < len(before)
        else Pipeline(template=new[origin - len(before)][0], nodes=new[origin - len(before)][1], num_microbatches=more)
        for origin, more in zip(origins, _each(delta.shares), strict=True)
    )
    spares = (*(() if base is None else base.plan.spares), *delta.spares)
    generations = () if base is None else base.pipeline_generations
    schedules = () if base is None else base.schedules
    rebuilt = OrderedPlan(
        generation=generation,
        plan=ExecutionPlan(pipelines=pipelines, spares=tuple(spares[index] for index in numbers_in(delta.spare_order))),
        pipeline_generations=tuple(
            number or generations[origin]
            for origin, number in zip(origins, _each(delta.pipeline_generations), strict=True)
        ),
        schedules=tuple(
            kind or schedules[origin] for origin, kind in zip(origins, _each(delta.schedules), strict=True)
        ),
        boundary=delta.boundary,
        partial=_partial(base, delta),
        num_sections=delta.num_sections,
    )
    if rebuilt.id.digest != delta.digest:
        raise WrongBase(f"the plan of generation {generation} has the digest {rebuilt.id.digest}, not {delta.digest}")
    return rebuilt


# --- what is committed of a step -------------------------------------------------------------------------------------


def _committed(base: OrderedPlan | None, ordered: OrderedPlan) -> Runs | None:
    """The microbatches that are committed before a plan; None where they follow from its base."""
    partial = ordered.partial
    section = (partial.generation, partial.number)
    if base is not None and _follows(base, section, ordered.boundary) == partial.microbatches:
        return None
    return runs_of(partial.microbatches)


def _partial(base: OrderedPlan | None, delta: PlanDelta) -> PartialStep:
    generation, number = delta.section
    if delta.committed is not None:
        microbatches: tuple[int, ...] | None = tuple(numbers_in(delta.committed))
    else:
        microbatches = None if base is None else _follows(base, delta.section, delta.boundary)
    if microbatches is None:
        raise WrongBase(f"section {number} of generation {generation} does not follow from the base")
    return PartialStep(microbatches=microbatches, loss=delta.loss, generation=generation, number=number)


def _follows(base: OrderedPlan, section: tuple[int, int], boundary: int) -> tuple[int, ...] | None:
    """What a section means under the base, or meant before it; None where it is of another plan."""
    generation, number = section
    if section == (0, 0):
        return ()
    before = base.partial_before(boundary + 1)
    if (before.generation, before.number) == section:
        return before.microbatches
    if generation != base.generation or number >= num_sections_of(base.plan, before.microbatches, base.num_sections):
        return None
    return committed_after(base.plan, before.microbatches, base.num_sections, number)


# --- sequences -------------------------------------------------------------------------------------------------------


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


def _edits(before: Sequence[H], after: Sequence[H]) -> tuple[tuple[H, ...], Runs]:
    """Return what `before` lacks, and where each of `after` is among `before` and then these."""
    places = {item: index for index, item in enumerate(before)}
    added = tuple(item for item in after if item not in places)
    for index, item in enumerate(added):
        places[item] = len(before) + index
    return added, runs_of(places[item] for item in after)


def _counted(values: Iterable[T]) -> tuple[tuple[int, T], ...]:
    return tuple((len(list(group)), value) for value, group in groupby(values))


def _each(counted: Iterable[tuple[int, T]]) -> list[T]:
    return [value for count, value in counted for _ in range(count)]


def _changed(now: Sequence[T], before: Sequence[T], origins: Sequence[int], *, same: S) -> Iterator[T | S]:
    for value, origin in zip(now, origins, strict=True):
        yield same if origin < len(before) and before[origin] == value else value


def _templates_of(pipelines: Iterable[Pipeline]) -> list[PipelineTemplate]:
    """All templates, in the order in which pipelines name them."""
    return list(dict.fromkeys({id(each.template): each.template for each in pipelines}.values()))


def _pipeline(before: Pipeline, more: int) -> Pipeline:
    """The same object where nothing changes: it knows its workers already."""
    return replace(before, num_microbatches=before.num_microbatches + more) if more else before
