"""The part of the protocol that is about plans: what one worker is told of a new one.

master ── PlanOrder ──> each worker        what changes from a plan that it has, and what it alone has to do
worker ── PlanNeeded ──> master            it has another plan than that one: the next order has the whole plan

Most of an order is the same for all, and is encoded once for all of them. How an order is made, and what a worker makes
of it, is in `control/plans`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from oobleck.plan import ExecutionPlan, PipelineTemplate, ScheduleKind

from .bases import ForWorker, FromWorker
from .checkpoint_messages import Restore
from .records import NOTHING, CommitRecord, PartialStep, SectionRecord, Segment, WorkerAddress
from .runs import Names, Runs

WorkerNames = tuple[tuple[int, Names], ...]
"""Workers in their order, as (device, nodes): nodes by their places among the new plan's, as in `NewPipeline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanId:
    """Names a plan that was ordered."""

    generation: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class OrderedPlan:
    """A plan that was ordered, with all that the next one is told as a change of."""

    generation: int
    plan: ExecutionPlan
    pipeline_generations: tuple[int, ...]
    """For each pipeline of the plan, the generation in which the group that links its stages is formed."""
    schedules: tuple[ScheduleKind, ...]
    """For each pipeline of the plan, in which order its stages work."""
    boundary: int
    """Steps applied when the plan takes effect."""
    partial: PartialStep
    """What of the step after the boundary is committed then."""
    num_sections: int
    """Into how many sections a step is cut under this plan."""

    @cached_property
    def id(self) -> PlanId:
        return PlanId(generation=self.generation, digest=self._digest())

    def partial_before(self, step: int) -> PartialStep:
        """What of a step was committed before this plan."""
        return self.partial if step == self.boundary + 1 else NOTHING

    def _digest(self) -> str:
        """Equal where all else is, on any machine; O(nodes)."""
        found = hashlib.blake2s(digest_size=8)
        texts: dict[int, str] = {}
        for pipeline in self.plan.pipelines:
            template = pipeline.template
            if id(template) not in texts:  # thousands of pipelines share a few
                texts[id(template)] = repr(template)
            found.update(f"{texts[id(template)]} {pipeline.nodes} {pipeline.num_microbatches}\n".encode())
        rest = (self.plan.spares, self.pipeline_generations, tuple(map(str, self.schedules)))
        found.update(repr((rest, self.boundary, self.partial, self.num_sections)).encode())
        return found.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPipeline:
    """A pipeline that the base lacks."""

    template: int
    """Counts the templates of the base, in the order in which its pipelines name them, then those of the delta."""
    nodes: Names
    """By their places among the base's nodes: those of its pipelines one after the other, then its spares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """A plan as what changes from another one, which is small where little does; or all of it, without a base."""

    templates: tuple[PipelineTemplate, ...]
    pipelines: tuple[NewPipeline, ...]
    order: Runs
    """The plan's pipelines, by their indices among those of the base and then these."""
    shares: tuple[tuple[int, int], ...]
    """(how many pipelines, microbatches that each of them takes more than in the base); new ones had none."""
    spares: Names
    """That were none in the base, by their places among its nodes."""
    spare_order: Runs
    """The plan's spares, by their indices among those of the base and then these."""
    pipeline_generations: tuple[tuple[int, int], ...]
    """(how many pipelines, generation); 0 for that of the base."""
    schedules: tuple[tuple[int, ScheduleKind | None], ...]
    """(how many pipelines, schedule); None for that of the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDelta:
    """An ordered plan as what changes from another one."""

    base: PlanId | None
    """None where all of the plan is told."""
    digest: str
    """Of the plan that comes out."""
    change: PlanChange
    boundary: int
    num_sections: int
    loss: float
    num_items: int
    """As the loss, of `OrderedPlan.partial`."""
    section: tuple[int, int]
    """The generation and the number of `OrderedPlan.partial`."""
    committed: Runs | None
    """Its microbatches; None where they follow from the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOrder:
    """What all workers with the same base are told; see `PlanUpdate`."""

    is_encoded_once: ClassVar[bool] = True
    """The codec keeps what it has written of one, for the next worker: see `wire`."""
    catch_up: CommitRecord | None
    catch_up_section: SectionRecord | None
    finish: int | None
    lost: Names
    """By their places among the base's nodes."""
    delta: PlanDelta
    initial: bool
    saves: bool
    restore: Restore | None
    moving: Runs
    """The layers that change hands."""
    regrouped: Runs
    """By their places among the plan's workers."""
    others_regrouped: WorkerNames
    """That are not in the plan."""
    assignment_version: int
    addresses: tuple[WorkerAddress, ...]
    """Where the workers listen that became ready since the base was ordered; all that are ready, without a base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTransfers:
    """The layers that one worker sends or receives. It may be all layers, of several peers each."""

    peers: WorkerNames
    items: tuple[tuple[int, int, int, int], ...]
    """(layer, peer, part, number of parts), in the order of all workers' transfers: it receives from the peer of an
    index, and sends to that of -1 - index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder(ForWorker):
    """Resolve what is in flight, then adopt a plan: what a worker has to know of it. It becomes a `PlanUpdate`."""

    generation: int
    common: CommonOrder
    segments: tuple[Segment, ...]
    """The extra segments of its own pipeline."""
    transfers: OwnTransfers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNeeded(FromWorker):
    """A worker has another plan than the one that an order changes: it is to be told the whole plan."""

    generation: int
