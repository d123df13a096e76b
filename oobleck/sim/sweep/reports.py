"""What a sweep's master hears of how fast nodes compute, many reports at once.

Workers report between steps, and not too often. As long as no worker's pace changes the reports change no decision, so
they are left out until somebody's has changed for as many of them as the master wants to agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from oobleck.control.protocol import Pace
from oobleck.control.speed import REPORTS_NEEDED, microbatch_s
from oobleck.planner import ExecutionPlan, Profile, WorkerId


class Reports:
    """How many times the usual time each worker takes, as the master knows it."""

    def __init__(self, profile_of: Callable[[str], Profile]) -> None:
        self._profile_of = profile_of
        self._told: dict[WorkerId, float] = {}

    def forget(self, node: str) -> None:
        """A node's worker starts again: the master treats it as normal, and hears of it again."""
        self._told = {worker_id: factor for worker_id, factor in self._told.items() if worker_id.node != node}

    def clear(self) -> None:
        """Another master knows nothing."""
        self._told.clear()

    def untold(self, plan: ExecutionPlan, factors: Mapping[str, float]) -> list[WorkerId]:
        """The workers of a plan whose pace the master does not know; O(workers). Those that rest report again."""
        self._told = {worker_id: factor for worker_id, factor in self._told.items() if worker_id in plan.layers_at}
        return [
            worker_id for worker_id in plan.worker_ids if self._told.get(worker_id) != factors.get(worker_id.node, 1.0)
        ]

    def tell(self, plan: ExecutionPlan, factors: Mapping[str, float]) -> Iterator[tuple[tuple[WorkerId, ...], Pace]]:
        """Report what is not reported yet: yields (workers, what each of them says), round by round.

        Who stops listening, for a plan is made again, has heard only those that have said it often enough.
        """
        untold = frozenset(self.untold(plan, factors))
        groups: dict[tuple[tuple[range, ...], int, float, int], list[WorkerId]] = defaultdict(list)
        paces: dict[tuple[tuple[range, ...], int, float, int], Pace] = {}
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                for worker_id in untold.intersection(stage.worker_ids):
                    factor = factors.get(worker_id.node, 1.0)
                    profile = self._profile_of(worker_id.node)
                    key = stage.chunks, len(stage.worker_ids), factor, id(profile)
                    groups[key].append(worker_id)
                    if key not in paces:
                        compute_s = factor * microbatch_s(profile, stage)
                        paces[key] = Pace(device=0, compute_s=compute_s, microbatches=1)
        for number in range(REPORTS_NEEDED + 1):
            for key, worker_ids in groups.items():
                yield tuple(worker_ids), paces[key]
                if number == REPORTS_NEEDED - 1:
                    self._told.update(dict.fromkeys(worker_ids, key[2]))
