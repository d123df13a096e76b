"""Saves: when, which worker saves which layer, what has arrived of one, and which can never be whole in memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from oobleck.control.protocol import DataPosition, Shard
from oobleck.job import CheckpointSpec
from oobleck.planner import ExecutionPlan, WorkerId

_FIRST_SAVE_S = 60.0
"""The interval before the cost of a save is known."""
_LEAST_INTERVAL_S = 10.0
_MOST_INTERVAL_S = 1800.0
# As if a day with one failure had passed before the run: an early failure then does not make saves incessant.
_PRIOR_FAILURE_S = 86_400.0
_DISK_SHARE = 0.5
"""The largest share of the time to spend on writing to disk."""


def best_interval_s(cost_s: float, mean_failure_s: float) -> float:
    """Return the time between saves that costs least, in seconds.

    A save costs `cost_s` of training, and a failure, one in `mean_failure_s` on average, half an interval of work: the
    sum is least at sqrt(2·cost·mean) (Young, "A first order approximation to the optimum checkpoint interval", CACM
    1974; Daly, FGCS 2006, adds terms that matter only if the cost is near the mean).
    """
    return math.sqrt(2.0 * cost_s * mean_failure_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """The costs of saves and the number of failures so far, and when they make the next save due."""

    spec: CheckpointSpec
    cost_s: float | None = None
    """The newest save's cost; None before the first."""
    disk_s: float = 0.0
    """The time until that save was on disk."""
    num_failures: int = 0
    """Failures that needed a checkpoint."""

    def next_step(self, last_step: int) -> int | None:
        """Return the step to save after, or None if time decides."""
        every = self.spec.save_steps
        if every is None and self.spec.save_interval_s is None and self.cost_s is None:
            # Until its first save, a run has nothing to go back to, and the cost of a save is unknown.
            return last_step + 1
        return None if every is None else (last_step // every + 1) * every

    def interval_s(self, now_s: float) -> float:
        """Return the seconds from one save to the next, if time decides."""
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
    """Distribute the layers among their holders on nodes that are not lost; O(layers · holders).

    The largest layers are assigned first, each to the holder that has the least to save so far (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969: at most 4/3 of the optimum if each worker holds everything). Layers without
    a holder are in no share.

    If `degree` devices share each stage, this distributes the parts of one `rank`.
    """
    # Only sizes and names decide, so all ranks choose alike, and all parts of a layer are saved on one node.
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
    name: str
    step: int
    generation: int
    began_s: float
    saved_at: str = ""
    position: DataPosition | None = None
    savers: dict[WorkerId, tuple[int, ...]] = field(default_factory=dict)
    """The layers of each share that is whole in memory."""
    in_memory: set[tuple[int, int]] = field(default_factory=set)
    """Their (layer, part): devices that share a stage save a part each."""
    shards: dict[tuple[int, int], Shard] = field(default_factory=dict)
    """The files on disk, by layer and part."""
    pause_s: float = 0.0
    copy_s: float = 0.0
    is_committing: bool = False
    asked: set[str] = field(default_factory=set)
    """The nodes that were told to write the manifest, and may still do so."""
    replaced: tuple[str, ...] = ()
    """Checkpoints that are too old once this one is complete."""
    committed: set[str] = field(default_factory=set)

    def note_share(self, worker_id: WorkerId, layers: tuple[int, ...], *, num_parts: int) -> None:
        self.savers[worker_id] = layers
        self.in_memory.update((layer, worker_id.device % num_parts) for layer in layers)

    @property
    def is_committed(self) -> bool:
        # Each node may have a disk of its own, so all writers that are left need the manifest.
        writers = {worker_id.node for worker_id in self.savers}
        return bool(self.committed) and writers & self.asked <= self.committed

    def unwritten(self, worker_id: WorkerId, *, num_parts: int) -> tuple[int, ...]:
        part = worker_id.device % num_parts
        return tuple(layer for layer in self.savers.get(worker_id, ()) if (layer, part) not in self.shards)


class BrokenSaves:
    """Saves that can never be whole in memory, known by their generation and step."""

    # All save after the same step, each its own share. So the loss of a worker of its plan breaks a save, and so does a
    # worker that missed the commit of that step and caught up with it later, perhaps before any share is reported.

    def __init__(self) -> None:
        self._trained: dict[str, int] = {}
        """The newest generation in whose plan each node had a part."""
        self._generation, self._boundary = 0, 0
        """The newest plan's generation, and the step with which it begins."""
        self._broken_generation = 0
        """The newest generation in which a worker was lost, or missed a save."""
        self._broken_finish = 0
        """The newest generation under whose order workers finished a step before one of them was lost."""

    def plan_adopted(self, nodes: Iterable[str], *, generation: int, boundary: int) -> None:
        """Note a plan for these nodes, whose steps begin after `boundary`."""
        self._generation, self._boundary = generation, boundary
        self._trained |= dict.fromkeys(nodes, generation)

    def worker_gone(self, node: str) -> None:
        if node not in self._trained:
            return  # It has no share of any save.
        if self._trained[node] < self._generation:
            self._broken_finish = self._generation  # It finished a step under the order of the newest plan.
        self.missed(self._trained[node])

    def missed(self, generation: int) -> None:
        """Note that a worker has not saved in this generation or before."""
        self._broken_generation = max(self._broken_generation, generation)

    def has(self, generation: int, step: int) -> bool:
        """Whether a save of this generation, after this step, is broken."""
        is_finish = generation == self._broken_finish == self._generation and step <= self._boundary
        return is_finish or generation <= self._broken_generation
