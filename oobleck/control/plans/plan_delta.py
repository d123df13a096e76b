"""A plan as the change of another one, and back: `rebuild(base, difference(base, plan)) == plan`, for any two plans.

What stays is named by its place in the base, in runs, and so is each node that the base has. So the size of a change is
proportional to the pipelines that change, and a plan without a base names each template once. The journal writes plans
like this, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol, TypeVar

from oobleck.control import protocol
from oobleck.errors import ConfigError
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate
from oobleck.schedule import ScheduleKind

from .sections import committed_after, num_sections_of

S = TypeVar("S")
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

Parts = tuple[ExecutionPlan, tuple[int, ...], tuple[ScheduleKind, ...]]
"""A plan, and the generation and the schedule of each pipeline."""


class WrongBase(Exception):
    """A plan cannot be rebuilt from the one that is at hand."""


class Planned(Protocol):
    """A plan, with the generation and the schedule of each pipeline, which a journal may lack."""

    @property
    def plan(self) -> ExecutionPlan: ...
    @property
    def pipeline_generations(self) -> tuple[int, ...]: ...
    @property
    def schedules(self) -> tuple[ScheduleKind, ...]: ...


# --- plans -----------------------------------------------------------------------------------------------------------


def nodes_of(planned: Planned | None) -> tuple[str, ...]:
    """Return all nodes of a plan, in the order whose places changes use: pipeline after pipeline, spares last."""
    # In the order of their names, the nodes of a pipeline need not be neighbours, and would form no runs.
    if planned is None:
        return ()
    return (*(node for pipeline in planned.plan.pipelines for node in pipeline.nodes), *planned.plan.spares)


def places_of(planned: Planned | None) -> Mapping[str, int]:
    """Return the place of each node among them; O(nodes)."""
    return {node: place for place, node in enumerate(nodes_of(planned))}


def change_between(base: Planned | None, now: Planned) -> protocol.PlanChange:
    """Return what changes from `base` to `now`, or all of it without a base. O(nodes)."""
    pipelines, before = now.plan.pipelines, _pipelines_of(base)
    known = _templates_of(before)
    templates = tuple(dict.fromkeys([*known, *_templates_of(pipelines)]))
    place = {template: index for index, template in enumerate(templates)}
    # Thousands of pipelines share a few templates. By identity, each template is hashed once and not for each of them.
    distinct = {id(each.template): each.template for each in (*before, *pipelines)}
    place_of = {key: place[template] for key, template in distinct.items()}
    added, order = _edits(
        [(place_of[id(each.template)], each.nodes) for each in before],
        [(place_of[id(each.template)], each.nodes) for each in pipelines],
    )
    origins = protocol.numbers_in(order)
    places = places_of(base)
    spares, spare_order = _edits(() if base is None else base.plan.spares, now.plan.spares)
    shares_before = [before[origin].num_microbatches if origin < len(before) else 0 for origin in origins]
    return protocol.PlanChange(
        templates=templates[len(known) :],
        pipelines=tuple(
            protocol.NewPipeline(template=template, nodes=protocol.named(nodes, places)) for template, nodes in added
        ),
        order=order,
        shares=_counted(each.num_microbatches - then for each, then in zip(pipelines, shares_before, strict=True)),
        spares=protocol.named(spares, places),
        spare_order=spare_order,
        pipeline_generations=_counted(
            _changed(now.pipeline_generations, () if base is None else base.pipeline_generations, origins, same=0)
        ),
        schedules=_counted(_changed(now.schedules, () if base is None else base.schedules, origins, same=None)),
    )


def apply_change(base: Planned | None, change: protocol.PlanChange) -> Parts:
    """Undo `change_between`; O(nodes). Raises WrongBase if the result is not a plan."""
    before = _pipelines_of(base)
    try:
        templates = (*_templates_of(before), *change.templates)
        nodes = nodes_of(base)
        new = [(templates[each.template], protocol.names_in(each.nodes, nodes)) for each in change.pipelines]
        origins = protocol.numbers_in(change.order)
        pipelines = tuple(
            _pipeline(before[origin], more)
            if origin < len(before)
            else Pipeline(
                template=new[origin - len(before)][0], nodes=new[origin - len(before)][1], num_microbatches=more
            )
            for origin, more in zip(origins, _each(change.shares), strict=True)
        )
        spares = (*(() if base is None else base.plan.spares), *protocol.names_in(change.spares, nodes))
        plan = ExecutionPlan(
            pipelines=pipelines, spares=tuple(spares[index] for index in protocol.numbers_in(change.spare_order))
        )
        generations = () if base is None else base.pipeline_generations
        schedules = () if base is None else base.schedules
        return (
            plan,
            tuple(
                number or generations[origin]
                for origin, number in zip(origins, _each(change.pipeline_generations), strict=False)
            ),
            tuple(kind or schedules[origin] for origin, kind in zip(origins, _each(change.schedules), strict=False)),
        )
    except (ConfigError, IndexError, ValueError) as error:
        raise WrongBase(f"no plan follows from the one before: {error}") from error


def difference(base: protocol.OrderedPlan | None, ordered: protocol.OrderedPlan) -> protocol.PlanDelta:
    """Return what changes from `base` to `ordered`, or all of it without a base. O(nodes)."""
    return protocol.PlanDelta(
        base=None if base is None else base.id,
        digest=ordered.id.digest,
        change=change_between(base, ordered),
        boundary=ordered.boundary,
        num_sections=ordered.num_sections,
        loss=ordered.partial.loss,
        num_items=ordered.partial.num_items,
        section=(ordered.partial.generation, ordered.partial.number),
        committed=_committed(base, ordered),
    )


def rebuild(base: protocol.OrderedPlan | None, delta: protocol.PlanDelta, generation: int) -> protocol.OrderedPlan:
    """Return the plan that a delta makes of its base, for `generation`; O(nodes). Raises WrongBase."""
    if delta.base is None:
        base = None
    elif base is None or base.id != delta.base:
        found = "none" if base is None else f"{base.id.generation} ({base.id.digest})"
        raise WrongBase(
            f"generation {generation} changes that of {delta.base.generation} ({delta.base.digest}), not {found}"
        )
    plan, pipeline_generations, schedules = apply_change(base, delta.change)
    rebuilt = protocol.OrderedPlan(
        generation=generation,
        plan=plan,
        pipeline_generations=pipeline_generations,
        schedules=schedules,
        boundary=delta.boundary,
        partial=_partial(base, delta),
        num_sections=delta.num_sections,
    )
    # A worker that has another base, or rebuilds the plan wrongly, finds that out here, before it acts.
    if rebuilt.id.digest != delta.digest:
        raise WrongBase(f"the plan of generation {generation} has the digest {rebuilt.id.digest}, not {delta.digest}")
    return rebuilt


# --- what is committed of a step -------------------------------------------------------------------------------------


def _committed(base: protocol.OrderedPlan | None, ordered: protocol.OrderedPlan) -> protocol.Runs | None:
    """Return the microbatches committed before a plan; None if they follow from its base."""
    partial = ordered.partial
    section = (partial.generation, partial.number)
    # Workers compute them from the base by the same rule, so an order has no list of thousands of microbatches.
    if base is not None and _follows(base, section, ordered.boundary) == partial.microbatches:
        return None
    return protocol.runs_of(partial.microbatches)


def _partial(base: protocol.OrderedPlan | None, delta: protocol.PlanDelta) -> protocol.PartialStep:
    generation, number = delta.section
    if delta.committed is not None:
        microbatches: tuple[int, ...] | None = tuple(protocol.numbers_in(delta.committed))
    else:
        microbatches = None if base is None else _follows(base, delta.section, delta.boundary)
    if microbatches is None:
        raise WrongBase(f"section {number} of generation {generation} does not follow from the base")
    return protocol.PartialStep(
        microbatches=microbatches, loss=delta.loss, num_items=delta.num_items, generation=generation, number=number
    )


def _follows(base: protocol.OrderedPlan, section: tuple[int, int], boundary: int) -> tuple[int, ...] | None:
    """Return the microbatches of a section under the base, or before it; None for another plan's section."""
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


def _edits(before: Sequence[H], after: Sequence[H]) -> tuple[tuple[H, ...], protocol.Runs]:
    """Return the items that `before` lacks, and the place of each of `after` among `before` and then these."""
    places = {item: index for index, item in enumerate(before)}
    added = tuple(item for item in after if item not in places)
    places.update((item, len(before) + index) for index, item in enumerate(added))
    return added, protocol.runs_of(places[item] for item in after)


def _counted(values: Iterable[T]) -> tuple[tuple[int, T], ...]:
    return tuple((len(list(group)), value) for value, group in groupby(values))


def _each(counted: Iterable[tuple[int, T]]) -> list[T]:
    return [value for count, value in counted for _ in range(count)]


def _changed(now: Sequence[T], before: Sequence[T], origins: Sequence[int], *, same: S) -> Iterator[T | S]:
    # A plan from a journal may lack these values altogether.
    for value, origin in zip(now, origins, strict=False):
        yield same if origin < len(before) and before[origin] == value else value


def _pipelines_of(base: Planned | None) -> tuple[Pipeline, ...]:
    return () if base is None else base.plan.pipelines


def _templates_of(pipelines: Iterable[Pipeline]) -> list[PipelineTemplate]:
    return list(dict.fromkeys({id(each.template): each.template for each in pipelines}.values()))


def _pipeline(before: Pipeline, more: int) -> Pipeline:
    # The same object if nothing changes: it knows its workers already.
    return replace(before, num_microbatches=before.num_microbatches + more) if more else before
