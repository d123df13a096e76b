"""Messages about plans: what a worker has to know of a new one.

master ── PlanOrder ──> each worker        changes of a plan that it has, and its own tasks
worker ── PlanNeeded ──> master            it has another plan: the next order has the whole one

Most of an order is equal for all workers, and encoded once for all of them. `control/plans` makes and reads orders.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from oobleck.job import Sharding
from oobleck.plan import ExecutionPlan, PipelineTemplate, ScheduleKind

from . import records
from .checkpoint_messages import Restore
from .runs import Names, Runs

WorkerNames = tuple[tuple[int, Names], ...]
"""Workers in order, as (device, nodes): nodes by their places among the new plan's, as in `NewPipeline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanId:
    generation: int
    digest: str


# Without slots, because `id` is kept in the instance's dict: its digest costs O(nodes).
@dataclass(frozen=True, kw_only=True)
class OrderedPlan:
    """A plan that was ordered, with everything that the next one may be a change of."""

    generation: int
    plan: ExecutionPlan
    pipeline_generations: tuple[int, ...]
    """The generation in which the group of each pipeline is formed."""
    schedules: tuple[ScheduleKind, ...]
    """The order in which the stages of each pipeline work."""
    boundary: int
    """The number of applied steps when the plan takes effect."""
    partial: records.PartialStep
    """What is committed of the step after the boundary then."""
    num_sections: int

    @cached_property
    def id(self) -> PlanId:
        return PlanId(generation=self.generation, digest=self._digest())

    def partial_before(self, step: int) -> records.PartialStep:
        """Return what was committed of a step before this plan."""
        return self.partial if step == self.boundary + 1 else records.NOTHING

    def _digest(self) -> str:
        found = hashlib.blake2s(digest_size=8)
        texts: dict[int, str] = {}
        for pipeline in self.plan.pipelines:
            template = pipeline.template
            # Thousands of pipelines share a few templates, whose texts are long.
            if id(template) not in texts:
                texts[id(template)] = repr(template)
            found.update(f"{texts[id(template)]} {pipeline.nodes} {pipeline.num_microbatches}\n".encode())
        # Texts of dataclasses and enums are the same on any machine, unlike Python's own hashes of strings.
        rest = (self.plan.spares, self.pipeline_generations, tuple(map(str, self.schedules)))
        found.update(repr((rest, self.boundary, self.partial, self.num_sections)).encode())
        return found.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPipeline:
    """A pipeline that the base lacks."""

    template: int
    """Its index among the base's templates, in the order of its pipelines, and then those of the delta."""
    nodes: Names
    """By their places among the base's nodes: those of its pipelines in order, then its spares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """A plan as a change of another one; as a whole without a base."""

    templates: tuple[PipelineTemplate, ...]
    pipelines: tuple[NewPipeline, ...]
    order: Runs
    """The plan's pipelines, by their indices among the base's and then the new ones."""
    shares: tuple[tuple[int, int], ...]
    """(how many pipelines, how many microbatches more each of them takes than in the base); new ones had none."""
    spares: Names
    """The new spares, by their places among the base's nodes."""
    spare_order: Runs
    """The plan's spares, by their indices among the base's and then the new ones."""
    pipeline_generations: tuple[tuple[int, int], ...]
    """(how many pipelines, generation); 0 for the base's."""
    schedules: tuple[tuple[int, ScheduleKind | None], ...]
    """(how many pipelines, schedule); None for the base's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDelta:
    """An ordered plan as a change of another one."""

    base: PlanId | None
    """None for a whole plan."""
    digest: str
    change: PlanChange
    boundary: int
    num_sections: int
    loss: float
    """Of `OrderedPlan.partial`, like the next three."""
    num_items: int
    section: tuple[int, int]
    """(generation, number)."""
    committed: Runs | None
    """The microbatches; None where they follow from the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOrder:
    """The part of an order that is equal for all workers with the same base; see `PlanUpdate`."""

    is_encoded_once: ClassVar[bool] = True
    """The codec keeps the encoded form for the next worker: see `wire`."""
    catch_up: records.CommitRecord | None
    catch_up_section: records.SectionRecord | None
    finish: int | None
    lost: Names
    """By their places among the base's nodes."""
    delta: PlanDelta
    initial: bool
    saves: bool
    restore: Restore | None
    moving: Runs
    regrouped: Runs
    """By their places among the plan's workers."""
    others_regrouped: WorkerNames
    """Regrouped workers that are not in the plan."""
    assignment_version: int
    sharding: Sharding | None
    addresses: tuple[records.WorkerAddress, ...]
    """Where workers listen that became ready since the base was ordered; without a base, all ready workers."""

    @property
    def goes_back(self) -> bool:
        """Whether steps may be run again."""
        return self.initial or self.restore is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTransfers:
    """The layers that one worker sends or receives, which may be all layers, each from several peers."""

    peers: WorkerNames
    items: tuple[tuple[int, int, int, int], ...]
    """(layer, peer, part, number of parts), in the order of all workers' transfers. The worker receives from the peer
    with index `peer`, or if that is negative, sends to the one with index -1 - `peer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder(records.ForWorker):
    """What one worker has to know of a plan: resolve the step in flight, then adopt it. Becomes a `PlanUpdate`."""

    generation: int
    common: CommonOrder
    segments: tuple[records.Segment, ...]
    """The extra segments of its own pipeline."""
    transfers: OwnTransfers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNeeded(records.FromWorker):
    """A worker has another plan than the one that an order changes, and needs the whole plan."""

    generation: int
