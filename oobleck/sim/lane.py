"""What a plan gives one worker to do, and the groups that it does it in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from oobleck.control.messages import Order
from oobleck.planner import ExecutionPlan, Pipeline, Place
from oobleck.schedule import ScheduleKind

from .fabric import GroupKey

__all__ = ["Bucket", "Lane", "Reduction"]

Bucket = tuple[GroupKey, tuple[int, ...]]
"""A group, and the layers whose gradients it sums."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A worker's place in its pipeline."""

    key: GroupKey
    index: int
    """Of the pipeline in its plan."""
    stage: int
    pipeline: Pipeline
    schedule: ScheduleKind

    @classmethod
    def find(cls, order: Order, place: Place) -> Lane | None:
        """The lane of a worker in the plan of an order; None for a spare."""
        located = order.plan.locate(place)
        if located is None:
            return None
        index, stage = located
        pipeline = order.plan.pipelines[index]
        key = GroupKey("pipeline", order.pipeline_generations[index], pipeline.places)
        return cls(key, index, stage, pipeline, order.schedules[index])

    @property
    def places(self) -> tuple[Place, ...]:
        return self.pipeline.places

    @property
    def is_last(self) -> bool:
        """Its stage is the last one, which knows of losses."""
        return self.stage == len(self.places) - 1

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.pipeline.stages[self.stage].layers)


@dataclass(frozen=True, slots=True)
class Reduction:
    """The groups of one worker for its gradients, and for the commit."""

    buckets: tuple[Bucket, ...]
    commit_key: GroupKey

    @classmethod
    def of(cls, plan: ExecutionPlan, lane: Lane, generation: int, lost: Collection[str] = ()) -> Reduction:
        """Those under a plan in a generation, without the nodes that are lost."""
        by_owners: dict[tuple[Place, ...], list[int]] = {}
        for layer in lane.layers:
            living = tuple(place for place in plan.owners_of(layer) if place.node not in lost)
            by_owners.setdefault(living, []).append(layer)
        buckets = tuple(
            (GroupKey("reduce", generation, members), tuple(layers)) for members, layers in sorted(by_owners.items())
        )
        everyone = tuple(place for place in plan.places if place.node not in lost)
        return cls(buckets, GroupKey("reduce", generation, everyone))

    @property
    def keys(self) -> tuple[GroupKey, ...]:
        return (self.commit_key, *(key for key, _ in self.buckets))
