"""Collectives of the devices of a sharded stage over the virtual fabric: the twin of `training.step.node_sums`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oobleck.control.steps import CommitState, GroupKey

from .fabric import Contribution, Violation
from .groups import GroupTable
from .layers import HeldLayers
from .ports import Moves


class NodeSums:
    def __init__(self, commit_state: CommitState, groups: GroupTable, layers: HeldLayers, *, num_lanes: int) -> None:
        """`num_lanes` as in `JobSpec`; with one there is nothing to sum."""
        self._worker_id, self._stopped = commit_state.worker_id, commit_state.is_pipeline_stopped
        self._groups, self._layers = groups, layers
        self._num_lanes = num_lanes

    def gather(self, key: GroupKey, step: int, *, interrupted: Callable[[], bool] | None = None) -> Moves:
        """Take all devices' shares of the weights with which `step` is computed."""
        # Shares of several steps would be no model's weights.
        own = Contribution(step, (), self._layers.digests(sorted(self._layers.held)))
        if self._num_lanes > 1:
            sequence = self._groups.post(key, own)
            yield from self._groups.sum(key, sequence, step, interrupted=interrupted or self._stopped)

    def scatter(self, key: GroupKey, step: int, microbatches: Sequence[int]) -> Moves:
        """Sum the gradients of a plan's microbatches, of which each device has computed its own."""
        if self._num_lanes == 1:
            return
        lanes = range(self._num_lanes)
        mine = tuple(each * self._num_lanes + self._worker_id.device % self._num_lanes for each in microbatches)
        sequence = self._groups.post(key, Contribution(step, mine))
        summed = yield from self._groups.sum(key, sequence, step, interrupted=self._stopped)
        if summed != tuple(sorted(each * self._num_lanes + lane for each in microbatches for lane in lanes)):
            raise Violation(f"{self._worker_id} computes {microbatches} of step {step}, and its node sums {summed}")
