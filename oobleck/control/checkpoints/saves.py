"""Saves: when, who saves which layer, what is there of one under way, and which can never be whole in memory.

All save after the same step, each its own share. So a save is broken by the loss of a worker of its plan, and where a
worker missed the commit of that step and caught up with it later. What was broken before any share of it was heard of
is still broken then.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from oobleck.control.protocol import DataPosition, Shard
from oobleck.job import CheckpointSpec
from oobleck.planner import ExecutionPlan, WorkerId

_FIRST_SAVE_S = 60.0
"""Before the cost of a save is known."""
_LEAST_INTERVAL_S = 10.0
_MOST_INTERVAL_S = 1800.0
_PRIOR_FAILURE_S = 86_400.0
"""Until a run has failures of its own to count, one that needs a checkpoint is taken to come once a day."""
_DISK_SHARE = 0.5
"""At most this share of the time is spent on writing to disk."""


def best_interval_s(cost_s: float, mean_failure_s: float) -> float:
    """The time between saves that costs least, in seconds.

    A save costs `cost_s` of training, and a failure, one in `mean_failure_s` on average, half an interval of work: the
    sum is least at sqrt(2·cost·mean) (Young, "A first order approximation to the optimum checkpoint interval", CACM
    1974; Daly, FGCS 2006, adds terms that matter only where the cost is near the mean).
    """
    return math.sqrt(2.0 * cost_s * mean_failure_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """What has been seen of saves and failures so far, and what follows from it."""

    spec: CheckpointSpec
    cost_s: float | None = None
    """What the newest save cost training; None before the first. A copy beside training counts in full: it takes the
    same memory's bandwidth."""
    disk_s: float = 0.0
    """How long it took until that save was on the disk."""
    num_failures: int = 0
    """That needed a checkpoint."""

    def next_step(self, last_step: int) -> int | None:
        """The step to save after, when steps are counted; None when time is.

        Left to itself, a run saves after its first step: until then, it has nothing to go back to.
        """
        every = self.spec.save_steps
        if every is None and self.spec.save_interval_s is None and self.cost_s is None:
            return last_step + 1
        return None if every is None else (last_step // every + 1) * every

    def interval_s(self, now_s: float) -> float:
        """Seconds from one save to the next, when time is counted."""
        if self.spec.save_interval_s is not None:
            return self.spec.save_interval_s
        if self.cost_s is None:
            return _FIRST_SAVE_S
        mean_failure_s = (_PRIOR_FAILURE_S + now_s) / (1 + self.num_failures)
        least_s = max(_LEAST_INTERVAL_S, self.disk_s / _DISK_SHARE)
        return max(least_s, min(_MOST_INTERVAL_S, best_interval_s(self.cost_s, mean_failure_s)))


def saving_shares(
    plan: ExecutionPlan, sizes: Sequence[int], *, lost: Collection[str] = (), rank: int = 0, degree: int = 1
) -> dict[WorkerId, tuple[int, ...]]:
    """Deal the layers among their holders on nodes that are not lost; O(layers · holders).

    The largest layers are assigned first, each to the holder that has the least to save so far (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969: at most 4/3 of the optimum where each worker holds everything). Layers that
    no worker holds any more are in no share.

    Where `degree` devices share each stage, those of one `rank` share out their parts of the layers; the others do
    alike, so that all parts of a layer are saved on one node.
    """
    load: dict[WorkerId, int] = {}
    dealt: dict[WorkerId, list[int]] = {}
    for layer in sorted(range(plan.num_layers), key=lambda layer: (-sizes[layer], layer)):
        owners = plan.owners_of(layer)
        holders = [
            worker_id for worker_id in owners if worker_id.node not in lost and worker_id.device % degree == rank
        ]
        if holders:
            saver = min(holders, key=lambda worker_id: (load.get(worker_id, 0), worker_id))
            load[saver] = load.get(saver, 0) + sizes[layer]
            dealt.setdefault(saver, []).append(layer)
    return {worker_id: tuple(sorted(layers)) for worker_id, layers in sorted(dealt.items())}


@dataclass(slots=True)
class Save:
    """A save under way."""

    name: str
    step: int
    generation: int
    began_s: float
    saved_at: str = ""
    position: DataPosition | None = None
    savers: dict[WorkerId, tuple[int, ...]] = field(default_factory=dict)
    """Whose shares are whole in memory, and which layers these are."""
    shards: dict[tuple[int, int], Shard] = field(default_factory=dict)
    """By layer and part: devices that share a stage save a part each."""
    pause_s: float = 0.0
    copy_s: float = 0.0
    is_committing: bool = False
    asked: set[str] = field(default_factory=set)
    """The nodes that were told to write the manifest, and may still do so."""
    replaced: tuple[str, ...] = ()
    """Checkpoints that are too old once this one is complete."""
    committed: set[str] = field(default_factory=set)

    def is_in_memory(self, num_layers: int, *, num_parts: int) -> bool:
        parts = {(layer, worker_id.device % num_parts) for worker_id, layers in self.savers.items() for layer in layers}
        return len(parts) == num_layers * num_parts

    def is_written(self, num_layers: int, *, num_parts: int) -> bool:
        return len(self.shards) == num_layers * num_parts

    @property
    def is_committed(self) -> bool:
        """Whether all that wrote layers, and are still there, have the manifest: each may have a disk of its own."""
        writers = {worker_id.node for worker_id in self.savers}
        return bool(self.committed) and writers & self.asked <= self.committed

    def unwritten(self, worker_id: WorkerId, *, num_parts: int) -> tuple[int, ...]:
        part = worker_id.device % num_parts
        return tuple(layer for layer in self.savers.get(worker_id, ()) if (layer, part) not in self.shards)


class BrokenSaves:
    """Knows saves by the generation and the step after which all were to save. What is whole already is not asked."""

    def __init__(self) -> None:
        self._trained: dict[str, int] = {}
        """By node: the newest generation in whose plan it had a part."""
        self._generation, self._boundary = 0, 0
        """The newest plan's, and the step with which it begins."""
        self._broken_generation = 0
        """The newest one in which a worker was lost, or missed a save."""
        self._broken_finish = 0
        """The newest one under whose order a step was finished by workers of which one was lost."""

    def plan_adopted(self, nodes: Iterable[str], *, generation: int, boundary: int) -> None:
        """A plan is ordered for these nodes; its steps are those after `boundary`."""
        self._generation, self._boundary = generation, boundary
        self._trained |= dict.fromkeys(nodes, generation)

    def worker_gone(self, node: str) -> None:
        """A worker of a node is gone, whatever it had still to save."""
        if node not in self._trained:
            return  # it has a share of nothing
        if self._trained[node] < self._generation:
            self._broken_finish = self._generation  # the step that was finished under the order of the newest plan
        self.missed(self._trained[node])

    def missed(self, generation: int) -> None:
        """A worker has not saved what all others did, in this generation or before."""
        self._broken_generation = max(self._broken_generation, generation)

    def has(self, generation: int, step: int) -> bool:
        """Whether a save of this generation, after this step, is broken."""
        is_finish = generation == self._broken_finish == self._generation and step <= self._boundary
        return is_finish or generation <= self._broken_generation
