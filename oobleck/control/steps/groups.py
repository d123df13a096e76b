"""A worker's place in a plan, and the groups in which it works.

Pure functions of plans and plan updates: all workers derive the same groups without talking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from oobleck.control.protocol import PlanUpdate, Status
from oobleck.planner import ExecutionPlan, LayerTransfer, Pipeline, WorkerId
from oobleck.schedule import ScheduleKind

Members = tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """A group, as its members know it without talking."""

    purpose: Literal["pipeline", "stage", "evaluation", "forward", "reduce", "transfer", "link"]
    generation: int
    """The generation whose plan update had it formed; the group may outlive that."""
    members: tuple[WorkerId, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Keys are looked up far more often than they are created.
        object.__setattr__(self, "_hash", hash((self.purpose, self.generation, self.members)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def name(self) -> str:
        digest = hashlib.blake2s(";".join(map(str, self.members)).encode(), digest_size=8).hexdigest()
        return f"{self.generation}/{self.purpose}/{digest}"


@dataclass(frozen=True, slots=True)
class Committee:
    """The workers that sum gradients and commit together: all of a plan, except those of lost nodes."""

    plan: ExecutionPlan
    generation: int
    lost: tuple[str, ...] = ()
    kept: Mapping[Members, GroupKey] = field(default_factory=dict, compare=False, repr=False)
    """The groups for sums of gradients under the plan before, by their members."""
    regrouped: frozenset[WorkerId] = field(default=frozenset(), compare=False, repr=False)
    """Workers whose groups are all formed again, as the plan update says."""
    members: Members = field(init=False)
    keys: dict[Members, GroupKey] = field(init=False, default_factory=dict, compare=False, repr=False)
    """The groups in use, by their members. The next committee may keep them."""

    def __post_init__(self) -> None:
        members = tuple(worker_id for worker_id in self.plan.worker_ids if worker_id.node not in self.lost)
        object.__setattr__(self, "members", members)

    def key_of(self, members: Members) -> GroupKey:
        """Return the group in which `members` sum gradients: the existing one, unless one of them is `regrouped`."""
        # All members derive the same key: those that are not regrouped have adopted the plan before, so either all of
        # them have such a group, or none.
        if members not in self.keys:
            kept = self.kept.get(members) if self.regrouped.isdisjoint(members) else None
            self.keys[members] = kept or GroupKey("reduce", self.generation, members)
        return self.keys[members]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInPlan:
    """A worker's place in its pipeline."""

    index: int
    stage: int
    pipeline: Pipeline
    schedule: ScheduleKind
    lane_key: GroupKey
    """The group that links the pipeline's stages."""
    stage_key: GroupKey
    """The group of the devices that share the stage."""

    @classmethod
    def find(cls, update: PlanUpdate, worker_id: WorkerId) -> PlaceInPlan | None:
        """Return a worker's place in an update's plan; None for a spare."""
        located = update.plan.locate(worker_id)
        if located is None:
            return None
        index, stage = located
        pipeline, generation = update.plan.pipelines[index], update.pipeline_generations[index]
        return cls(
            index=index,
            stage=stage,
            pipeline=pipeline,
            schedule=update.schedules[index],
            lane_key=GroupKey("pipeline", generation, pipeline.worker_ids),
            stage_key=GroupKey("stage", generation, pipeline.stages[stage].worker_ids),
        )

    @property
    def chunks(self) -> tuple[range, ...]:
        """The layers of each chunk of its stage."""
        return self.pipeline.stages[self.stage].chunks

    def levels(self, is_block: Callable[[int], bool]) -> dict[int, str]:
        """Return what each block of its stage recomputes; `is_block` tells which layers are blocks."""
        found: dict[int, str] = {}
        for chunk in self.pipeline.stages[self.stage].templates:
            found |= chunk.levels([layer for layer in chunk.layers if is_block(layer)])
        return found

    @property
    def layers(self) -> tuple[int, ...]:
        return self.pipeline.stages[self.stage].layers

    @property
    def num_stages(self) -> int:
        return len(self.pipeline.stages)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


def transfer_key(item: LayerTransfer, generation: int) -> GroupKey:
    """Return the group in which a layer moves: the two workers alone."""
    return GroupKey("transfer", generation, tuple(sorted((item.source, item.target))))


def transfer_keys(transfers: Iterable[LayerTransfer], generation: int, worker_id: WorkerId) -> tuple[GroupKey, ...]:
    """Return the groups in which a worker sends or receives layers."""
    mine = (transfer_key(item, generation) for item in transfers if worker_id in (item.source, item.target))
    return tuple(dict.fromkeys(mine))


def regrouped(
    worker_ids: Collection[WorkerId], statuses: Mapping[WorkerId, Status], newest: int
) -> tuple[WorkerId, ...]:
    """Return the workers whose groups cannot be kept; `newest` is the newest ordered generation, 0 for none."""
    # Newcomers have none. A worker that has not adopted the newest plan may have formed some of its groups, and so has
    # one that forms them during its first step. One with open sums may have sent a part that the others never read.
    return tuple(
        [
            worker_id
            for worker_id in worker_ids
            if (status := statuses.get(worker_id)) is None or status.has_open_groups or status.adopted != newest
        ]
    )
