"""How fast each node computes, compared to its stage's prediction and to the others.

A node counts as slow if it has taken clearly longer than its peers for some time. Its peers are those that hold the
same layers, or all if these are few. A slow-down of all alike is no reason to replan. How much longer is clear depends
on how much the reports of one worker vary.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

from oobleck.control.protocol import Pace
from oobleck.plan import ScheduleKind
from oobleck.planner import ExecutionPlan, Profile, Stage, WorkerId
from oobleck.planner.profiles import stage_more_s

REPORTS_NEEDED = 5
"""How many reports have to agree."""
# Among fewer workers with the same layers all are compared, by the profile's times for their layers.
_FEWEST_PEERS = 3
# This multiple of the usual time is slow, whatever the noise and the comparison: the profile's times for other layers
# may be wrong by that much.
_SLOW = 1.5
# This multiple is slow if reports hardly vary, and peers do the same work.
_SLOWER_THAN_PEERS = 1.25
# A slow node exceeds this multiple of the variation of one worker's reports.
_NOISES = 3.0
_NORMAL_SHARE, _CHANGED_SHARE = 0.4, 0.6
"""Shares of what makes a node slow: below the first it is normal again; changes above the second are planned for."""
_SAME = 0.1
"""Two factors that differ by less than this share are the same."""
_QUIET = 4
"""A node that has not changed for this multiple of its wait no longer counts as going back and forth."""
_SHORTEST_INTERVAL_S = 1.0
# This limits all workers together: each report costs the master time, because no two are equal.
_REPORTS_PER_S = 1000.0


@dataclass(slots=True)
class _Change:
    """The latest change of how slow a node counts as."""

    before: float
    wait: int = 1
    """The rounds of reports that the next change has to wait."""
    rounds: int = 0
    """The rounds of reports since."""


class SpeedTracker:
    """The latest reports of each worker in the plan."""

    def __init__(self) -> None:
        self._ratios: dict[WorkerId, deque[float]] = {}
        """Measured over expected seconds for a microbatch, by worker."""
        self.slow: Mapping[str, float] = {}
        """The slow nodes that are planned for; 2.0 takes twice the usual time."""
        self._changes: dict[str, _Change] = {}
        self._heard: set[WorkerId] = set()
        """The workers that have reported in this round."""
        self._is_round_over = False

    def restore(self, slow: Mapping[str, float]) -> None:
        self.slow = slow

    def note(
        self,
        worker_id: WorkerId,
        pace: Pace,
        plan: ExecutionPlan,
        profile: Profile,
        schedules: Sequence[ScheduleKind] = (),
    ) -> None:
        """Note the time of a worker's latest microbatches, if the profile predicts one.

        `schedules` are those of the plan's pipelines; by default, none splits its backward passes.
        """
        located = plan.locate(worker_id)
        if located is None or not pace.microbatches or not 0 < pace.compute_s < math.inf:
            return
        stage = plan.pipelines[located[0]].stages[located[1]]
        ratios = self._ratios.setdefault(worker_id, deque(maxlen=REPORTS_NEEDED))
        expected_s = microbatch_s(profile, stage, splits=is_split(located, schedules))
        ratios.append(pace.compute_s / pace.microbatches / expected_s)
        self._is_round_over |= worker_id in self._heard
        self._heard.add(worker_id)
        self._is_round_over |= len(self._heard) >= len(plan.worker_ids)

    def forget(self, node: str) -> None:
        """Take a node for normal: it is lost, or its worker starts again."""
        self._ratios = {worker_id: ratios for worker_id, ratios in self._ratios.items() if worker_id.node != node}
        self.slow = {name: factor for name, factor in self.slow.items() if name != node}
        self._changes.pop(node, None)

    def take_change(self, plan: ExecutionPlan) -> bool:
        """Whether a round of reports changes which nodes are slow, or clearly how slow; O(workers log workers)."""
        if not self._is_round_over:
            return False
        self._is_round_over = False
        self._heard.clear()
        worker_ids = plan.worker_ids
        known = {
            worker_id: ratios
            for worker_id in worker_ids
            if len(ratios := self._ratios.get(worker_id, ())) == REPORTS_NEEDED
        }
        # Without all reports it is not clear what is normal. Of two workers, the quicker one is.
        if len(known) < len(worker_ids) or len(known) == 1:
            return False
        slow = self._calmed(self._judge(_compare(known, plan)))
        if slow == self.slow:
            return False
        self.slow = slow
        return True

    def usual(self, plan: ExecutionPlan, schedules: Sequence[ScheduleKind]) -> dict[tuple[str, bool], float] | None:
        """Return how many times the profile's seconds nodes take, as (node, whether its passes are split).

        Returns None while some node is slow, or has not reported often enough under this plan.
        """
        known = [self._ratios.get(worker_id, ()) for worker_id in plan.worker_ids]
        if self.slow or any(len(ratios) < REPORTS_NEEDED for ratios in known):
            return None
        found: dict[tuple[str, bool], float] = {}
        for worker_id, ratios in zip(plan.worker_ids, known, strict=True):
            located = plan.locate(worker_id)
            assert located is not None, "it trains under the plan"
            key = worker_id.node, is_split(located, schedules)
            found[key] = max(median(ratios), found.get(key, 0.0))  # a node's step takes as long as its slowest device
        return found

    def begin_again(self) -> None:
        """Forget all reports: they were compared with other profiles, or are of another plan's work."""
        self._ratios.clear()
        self._heard.clear()
        self._is_round_over = False

    def _calmed(self, slow: Mapping[str, float]) -> dict[str, float]:
        """Return the factors without changes that have to wait.

        How slow a node looks depends on its peers, which the plan chooses, and the plan on how slow it looks. Where
        most nodes are slow, a plan and its verdict could refute each other at each round.
        """
        calmed: dict[str, float] = {}
        for change in self._changes.values():
            change.rounds += 1
        for node in sorted({*self.slow, *slow}):
            before, now = self.slow.get(node, 1.0), slow.get(node, 1.0)
            if now != before:
                last = self._changes.get(node)
                # Each return to what it was doubles the wait, so that no node is moved back and forth.
                if last is not None and last.rounds < last.wait:
                    now = before
                else:
                    is_back = last is not None and math.isclose(now, last.before, rel_tol=_SAME)
                    is_soon = last is not None and last.rounds < _QUIET * max(last.wait, REPORTS_NEEDED)
                    wait = 2 * last.wait if last is not None and is_back and is_soon else 1
                    self._changes[node] = _Change(before, wait)
            if now != 1.0:
                calmed[node] = now
        return calmed

    def _judge(self, seen: Mapping[str, _Seen]) -> dict[str, float]:
        # Nodes that rest send no reports, and stay as slow as they were.
        slow = {node: factor for node, factor in self.slow.items() if node not in seen}
        for node, worst in seen.items():
            before, now = self.slow.get(node), round(worst.middle, 2)
            if before is None:
                if worst.least > worst.limit:
                    slow[node] = now
            # A slow node is normal again only once it is clearly faster than the limit, so that none is moved back and
            # forth.
            elif worst.most >= worst.beyond(_NORMAL_SHARE):
                agree = worst.most < worst.limit * worst.least
                is_other = max(before, now) > worst.beyond(_CHANGED_SHARE) * min(before, now)
                slow[node] = now if agree and is_other else before
        return slow


def report_interval_s(num_workers: int) -> float:
    """Return the least seconds between two reports of a worker, which are sent between steps."""
    return max(_SHORTEST_INTERVAL_S, num_workers / _REPORTS_PER_S)


class PaceMeter:
    """Adds up computation, and makes a report when one is due."""

    def __init__(self, device: int, now_s: float) -> None:
        self._device = device
        self._compute_s = 0.0
        self._microbatches = 0
        self._since_s = now_s
        self._interval_s = report_interval_s(1)

    def adopt(self, num_workers: int) -> None:
        self._interval_s = report_interval_s(num_workers)

    def add(self, compute_s: float, num_microbatches: int) -> None:
        """Note the time of some microbatches, without waits."""
        self._compute_s += compute_s
        self._microbatches += num_microbatches

    def take(self, now_s: float) -> Pace | None:
        """Return a report if one is due, and begin the next."""
        if now_s < self._since_s + self._interval_s or not self._microbatches:
            return None
        pace = Pace(device=self._device, compute_s=self._compute_s, microbatches=self._microbatches)
        self._compute_s, self._microbatches, self._since_s = 0.0, 0, now_s
        return pace


class _Seen(NamedTuple):
    """The reports of a node's slowest workers, as multiples of the usual time."""

    middle: float
    least: float
    most: float
    limit: float

    def beyond(self, share: float) -> float:
        """Return a time that is part of the way from usual to slow."""
        return 1 + share * (self.limit - 1)


def _compare(known: Mapping[WorkerId, Sequence[float]], plan: ExecutionPlan) -> dict[str, _Seen]:
    """Compare each worker with those of the same layers, or with all; return the slowest of each node."""
    noise = median(max(ratios) / min(ratios) - 1 for ratios in known.values())
    clear = min(_SLOW, max(_SLOWER_THAN_PEERS, 1 + _NOISES * noise))
    middles = {worker_id: median(ratios) for worker_id, ratios in known.items()}
    peers: dict[tuple[range, ...], list[float]] = defaultdict(list)
    stages = [
        (stage, worker_id) for pipeline in plan.pipelines for stage in pipeline.stages for worker_id in stage.worker_ids
    ]
    for stage, worker_id in stages:
        peers[stage.chunks].append(middles[worker_id])
    # The lower of the two in the middle finds a slow half, and still does when the others are left out or lost. With
    # the mean of the two, each plan would change the verdict that it was made from.
    usual = {layers: median_low(ratios) for layers, ratios in peers.items() if len(ratios) >= _FEWEST_PEERS}
    usual_of_all = median_low(middles.values())
    seen: dict[str, _Seen] = {}
    for stage, worker_id in stages:
        against = usual.get(stage.chunks, usual_of_all)
        ratios = known[worker_id]
        middle = middles[worker_id] / against
        mine = middle, min(ratios) / against, max(ratios) / against, clear if stage.chunks in usual else _SLOW
        before = seen.get(worker_id.node)
        seen[worker_id.node] = _Seen(*mine) if before is None else _Seen(*map(max, mine, before))
    return seen


def found_out_s(step_s: float, num_workers: int) -> float:
    """Return the seconds in which a node that has become slow is found out."""
    interval_s = report_interval_s(num_workers)
    if step_s:
        interval_s = step_s * math.ceil(interval_s / step_s)
    return (REPORTS_NEEDED + 1) * interval_s


def is_split(place: tuple[int, int], schedules: Sequence[ScheduleKind]) -> bool:
    """Return whether the stage at a place of the plan splits its backward passes: a pipeline's first sends none."""
    pipeline, stage = place
    return bool(schedules) and schedules[pipeline] is ScheduleKind.ZERO_BUBBLE and stage > 0


def microbatch_s(profile: Profile, stage: Stage, *, splits: bool = False) -> float:
    """Return the profile's seconds for a microbatch, forward and backward, on a stage's devices.

    With `splits`, the backward pass is in two parts, if these were measured.
    """
    devices = len(stage.worker_ids)
    layers = [profile.layers[layer] for layer in stage.layers]
    parts = [layer.split for layer in layers if layer.split is not None]
    if splits and devices == 1 and len(parts) == len(layers):
        return math.fsum(part.forward_s + part.backward_input_s + part.backward_weight_s for part in parts)
    own_s = math.fsum(layer.forward_s[devices] + layer.backward_s[devices] for layer in layers)
    return own_s + math.fsum(stage_more_s(profile, chunk) for chunk in stage.templates)
