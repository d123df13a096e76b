"""The workers' reports of their pace to a sweep's master, many at once.

Real workers report between steps, and rarely. Reports of an unchanged pace change no decision, so a sweep leaves them
out; after a change it makes as many reports as the master wants to agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from oobleck.control.protocol import Pace
from oobleck.control.speed import REPORTS_NEEDED, is_split, microbatch_s
from oobleck.plan import ScheduleKind
from oobleck.planner import ExecutionPlan, Profile, WorkerId


class Reports:
    """The factor of each worker's usual time that the master knows."""

    def __init__(self, profile_of: Callable[[str], Profile], *, is_needed: bool) -> None:
        """Without `is_needed`, all nodes always keep the profile's pace, and no reports are due."""
        self._profile_of = profile_of
        self._is_needed = is_needed
        self._known: dict[WorkerId, float] = {}

    def forget(self, node: str) -> None:
        """Forget the reports of a node whose worker restarts: the master treats it as normal again."""
        self._known = {worker_id: factor for worker_id, factor in self._known.items() if worker_id.node != node}

    def clear(self) -> None:
        self._known.clear()

    def due(self, plan: ExecutionPlan, factors: Mapping[str, float]) -> list[WorkerId]:
        """Return the workers of a plan whose pace the master does not know; O(workers)."""
        if not self._is_needed:
            return []
        # Workers that leave the plan report again once they are back.
        self._known = {worker_id: factor for worker_id, factor in self._known.items() if worker_id in plan.layers_at}
        return [each for each in plan.worker_ids if self._known.get(each) != factors.get(each.node, 1.0)]

    def make(
        self, plan: ExecutionPlan, schedules: Sequence[ScheduleKind], factors: Mapping[str, float]
    ) -> Iterator[tuple[tuple[WorkerId, ...], Pace]]:
        """Yield the reports that are due as (workers, each one's report), round by round.

        If the caller stops, for a new plan, the master knows only the workers with enough reports.
        """
        due = frozenset(self.due(plan, factors))
        groups: dict[tuple[tuple[range, ...], int, float, int, bool], list[WorkerId]] = defaultdict(list)
        paces: dict[tuple[tuple[range, ...], int, float, int, bool], Pace] = {}
        for index, pipeline in enumerate(plan.pipelines):
            for place, stage in enumerate(pipeline.stages):
                splits = is_split((index, place), schedules)
                for worker_id in due.intersection(stage.worker_ids):
                    factor = factors.get(worker_id.node, 1.0)
                    profile = self._profile_of(worker_id.node)
                    key = stage.chunks, len(stage.worker_ids), factor, id(profile), splits
                    groups[key].append(worker_id)
                    if key not in paces:
                        compute_s = factor * microbatch_s(profile, stage, splits=splits)
                        paces[key] = Pace(device=0, compute_s=compute_s, microbatches=1)
        # Where only some workers report, a round is over once one of them reports again.
        for number in range(REPORTS_NEEDED + 1):
            for key, worker_ids in groups.items():
                yield tuple(worker_ids), paces[key]
                if number == REPORTS_NEEDED - 1:
                    self._known.update(dict.fromkeys(worker_ids, key[2]))
