"""The workers of all nodes in one state, since they move in step.

The cluster mode moves workers one by one; here only the moments that matter are computed: the commits of steps, the end
of the step in flight, the adoption of a plan.

    STOPPED ── a plan ──> FINISHING (the step in flight) ──> ADOPTING (groups, layers) ──> TRAINING
       ^                         │ a fence                        │ a fence                     │ a loss, a fence
       └─────────────────────────┴────────────────────────────────┴─────────────────────────────┘

This is a closed form of `control.steps.Follower`, and no driver of it: that would take every move of every worker. A
property ties the two (`test_the_journal_of_a_cluster_run_gives_the_same_plans_in_the_sweep_mode` in
`tests/sim/test_modes.py`). Both take the shares of microbatches and the ends of sections from `control.plans`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

from oobleck.control import protocol
from oobleck.control.plans import num_sections_of, shares_of
from oobleck.control.steps import broken_pipelines, without
from oobleck.planner import ExecutionPlan, Pipeline, WorkerId
from oobleck.schedule import ScheduleKind, section_stops
from oobleck.sim.costs import Costs, NodeKinds, StepTimes

# A step is complete when it lacks less than this share, since times are sums of floats.
_NEARLY = 1e-9

_Answers = list[tuple[tuple[WorkerId, ...], protocol.Status]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedSteps:
    """Steps committed in sequence, under one plan at one pace."""

    first_step: int
    last_step: int
    end_s: float
    step_s: float
    generation: int


@dataclass(frozen=True, slots=True)
class _Pending:
    update: protocol.PlanUpdate
    commit_s: float
    """When the step in flight is committed; the time of the update where none is finished."""
    adopt_s: float
    transfer_s: float
    waits_s: tuple[float, float]
    """When the workers that had computed their own share of that step began and ended to wait for orders and groups."""


class AnalyticWorkers:
    """All workers of the sweep mode. Times only go forward."""

    def __init__(
        self, kinds: NodeKinds, *, num_samples: int, most_steps: int, costs: Costs, saving_share: float = 0.0
    ) -> None:
        """Take the seconds for which checkpoints stop each second of training as `saving_share`."""
        self.max_steps = most_steps
        self._num_samples = num_samples
        self._costs = costs
        self._saving_share = saving_share
        self._pace = StepTimes(kinds.profile, profile_of=kinds.own_profile_of)
        self.plan: ExecutionPlan | None = None  # in force; None before the first, and after all state was lost
        self.schedules: tuple[ScheduleKind, ...] = ()  # one for each pipeline of the plan
        # The plan's workers by the layers that they hold and the microbatches that they take.
        self._teams: Mapping[tuple[tuple[int, ...], int], tuple[WorkerId, ...]] = {}
        self._adopted = 0
        self._applied = 0
        self.last_record: protocol.CommitRecord | None = None
        self._began_s = 0.0
        self.step_s = inf
        # The part of the plan's first step that was committed under the plan before, and the time of the rest.
        self._partial: protocol.PartialStep = protocol.NOTHING
        self._rest_s = inf
        self._num_sections = 1
        self._number = 0  # sections of the step in flight that were committed under this plan at the last fence
        self.factors: dict[str, float] = {}  # by slow node: its step time relative to the usual one
        self._stopped_s: float | None = None  # nothing is committed from then on
        self._pending: _Pending | None = None
        self._busy_s: tuple[float, float] = (0.0, 0.0)  # when workers last computed for a committed step

    def set_factor(self, node: str, factor: float, now_s: float) -> None:
        if factor == 1.0:
            self.factors.pop(node, None)
        else:
            self.factors[node] = factor
        if self.plan is not None and self._pending is None:
            until_s = now_s if self._stopped_s is None else self._stopped_s
            done = (until_s - self._began_s) / self._this_s
            self._set_pace(self.plan)
            # The share that is done stays done.
            self._began_s = until_s - done * self._this_s

    def stop(self, now_s: float) -> None:
        """Commit nothing from now on, since a worker that all wait for is gone; whole pipelines compute on."""
        if self._stopped_s is None:
            self._stopped_s = now_s

    def resume(self, now_s: float) -> None:
        """Continue as if nothing had happened: all awaited workers are back."""
        if self._stopped_s is not None:
            self._began_s += now_s - self._stopped_s
            self._stopped_s = None

    def is_training(self, node: str) -> bool:
        """Return whether all workers would wait for this node."""
        plans = [self.plan, self._pending.update.plan if self._pending else None]
        return any(plan is not None and node in plan.nodes for plan in plans)

    def finish_step(self) -> None:
        """Train no further than the step in flight."""
        boundary = self._applied if self._pending is None else self._pending.update.boundary
        self.max_steps = min(self.max_steps, boundary + 1)

    @property
    def is_computing(self) -> bool:
        """Whether steps are being committed."""
        return self.plan is not None and self._pending is None and self._stopped_s is None

    @property
    def has_finished(self) -> bool:
        return self.plan is not None and self._pending is None and self._applied >= self.max_steps

    def speaker(self, is_heard: Callable[[str], bool]) -> WorkerId | None:
        """Return a worker of the plan in force that can report commits."""
        worker_ids = chain.from_iterable(self._teams.values())
        return next((worker_id for worker_id in worker_ids if is_heard(worker_id.node)), None)

    @property
    def next_s(self) -> float:
        """When an update in progress is adopted, or the last step committed; infinity if neither will happen."""
        if self._pending is not None:
            return self._pending.adopt_s
        if self.plan is None or self._stopped_s is not None or self.has_finished:
            return inf
        return self._began_s + (self.max_steps - self._applied) * self.step_s

    def advance(self, now_s: float) -> Iterator[CommittedSteps]:
        """Let time pass up to `now_s`; yield the steps committed since the last call, at most two stretches."""
        pending = self._pending
        if pending is None:
            yield from self._train_until(now_s)
            return
        if pending.update.finish is not None and self._applied < pending.update.finish and pending.commit_s <= now_s:
            yield self._commit(1, pending.commit_s, pending.commit_s - self._began_s)
            self._began_s = pending.commit_s
        if pending.adopt_s <= now_s:
            self._adopt(pending)

    def _train_until(self, now_s: float) -> Iterator[CommittedSteps]:
        if self.plan is None:
            return
        until_s = now_s if self._stopped_s is None else min(now_s, self._stopped_s)
        if self._partial.microbatches and until_s >= self._began_s + self._rest_s * (1 - _NEARLY):
            end_s, step_s = self._began_s + self._rest_s, self._rest_s
            # Rounding may put the end a little after now.
            yield self._commit(1, min(end_s, now_s), step_s)
            self._began_s = end_s
        if self._partial.microbatches:
            return
        number = min(self.max_steps - self._applied, int((until_s - self._began_s) / self.step_s + _NEARLY))
        if number > 0:
            end_s = self._began_s + number * self.step_s
            yield self._commit(number, min(end_s, now_s), self.step_s)
            self._began_s = end_s

    def _commit(self, number: int, end_s: float, step_s: float) -> CommittedSteps:
        first = self._applied + 1
        self._applied += number
        self._partial, self._number = protocol.NOTHING, 0
        self.last_record = protocol.CommitRecord(
            step=self._applied,
            generation=self._adopted,
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.0,
            num_samples=self._num_samples,
            samples_repeated=0,
            samples_missing=0,
            duration_s=step_s,
        )
        self._busy_s = (self._busy_s[0], end_s)
        return CommittedSteps(
            first_step=first, last_step=self._applied, end_s=end_s, step_s=step_s, generation=self._adopted
        )

    def answers(self, generation: int, now_s: float, silent: Collection[str], idle: Collection[WorkerId]) -> _Answers:
        """Return the answers to a fence as (workers, status), with like workers together.

        `silent` are nodes that do not answer, `idle` the workers without a part in the plan in force.
        """
        self.stop(now_s)
        if self._pending is None:
            self._number = self._sections_committed()
        else:
            if self._applied == self._pending.update.boundary:
                self._began_s = now_s  # nothing of the next step was computed while layers were exchanged
            self._pending = None
        partial = None
        if self._number:
            partial = protocol.SectionRecord(
                step=self._applied + 1, generation=self._adopted, number=self._number, loss=0.0
            )
        idle_status = protocol.Status(
            device=0,
            generation=generation,
            applied=self._applied,
            last_record=self.last_record,
            reduced=None,
            adopted=0,
            layers=(),
            microbatches_done=0,
            broken=False,
        )
        training_status = replace(idle_status, adopted=self._adopted, partial=partial)
        answers: _Answers = []
        done = max(0.0, min(1.0, (now_s - self._began_s) / self._this_s)) if self.plan is not None else 0.0
        for (layers, num_microbatches), worker_ids in self._teams.items():
            heard = tuple([each for each in worker_ids if each.node not in silent]) if silent else worker_ids
            if heard:
                microbatches_done = int(done * num_microbatches)
                status = replace(training_status, layers=layers, microbatches_done=microbatches_done)
                answers.append((heard, status))
        if idle:
            answers.append((tuple(idle), idle_status))
        return answers

    @property
    def _this_s(self) -> float:
        """The seconds that the step in flight takes under the plan in force."""
        return self._rest_s if self._partial.microbatches else self.step_s

    def _set_pace(self, plan: ExecutionPlan) -> None:
        committing_s = self._costs.committing_s(len(plan.worker_ids))
        # Checkpoints are few, so each step has its share of them.
        saving = 1 + self._saving_share
        self.step_s = self._rest_s = saving * self._pace.step_s(plan, self.factors, self.schedules) + committing_s
        if self._partial.microbatches:
            shares = shares_of(plan, self._partial.microbatches)
            ends_s = (
                self._pace.compute_s(pipeline, len(share), self.factors, kind)
                for pipeline, share, kind in zip(plan.pipelines, shares, self.schedules, strict=True)
            )
            self._rest_s = saving * (max(ends_s) + self._pace.reduce_s(plan)) + committing_s

    def _sections_committed(self) -> int:
        plan = self.plan
        if plan is None or self._num_sections == 1:
            return 0
        assert self._stopped_s is not None
        # A section is committed once the slowest pipeline has taken its last microbatch backward, and reduced.
        shares = shares_of(plan, self._partial.microbatches)
        number = num_sections_of(plan, self._partial.microbatches, self._num_sections)
        stops = [
            section_stops(len(share), number, round_size=pipeline.template.round_size)
            for pipeline, share in zip(plan.pipelines, shares, strict=True)
        ]
        ends_s = [
            max(
                self._pace.compute_s(pipeline, stop[section], self.factors, kind)
                for pipeline, stop, kind in zip(plan.pipelines, stops, self.schedules, strict=True)
            )
            + self._pace.reduce_s(plan)
            for section in range(number - 1)
        ]
        return bisect_right(ends_s, self._stopped_s - self._began_s)

    def take_update(self, update: protocol.PlanUpdate, now_s: float, *, transfer_s: float) -> None:
        """Begin to carry out a plan update, whose layers take `transfer_s` to copy."""
        # A worker forms the group of all workers and that of its layers' owners; its pipeline mostly keeps its own.
        owners = len(update.plan.pipelines)
        forming_s = self._costs.forming_s((len(update.plan.worker_ids), owners))
        commit_s, waits_s = now_s, (now_s, now_s)
        if update.finish is not None:  # the group of all is formed for this step already, but other owners follow
            commit_s, waits_s = self._finished_s(update, now_s, forming_s)
            forming_s = self._costs.forming_s((owners,))
        adopt_s = commit_s + forming_s + transfer_s + self._costs.warm_up_s
        self._pending = _Pending(update, commit_s, adopt_s, transfer_s, waits_s)

    def _finished_s(
        self, update: protocol.PlanUpdate, ordered_s: float, forming_s: float
    ) -> tuple[float, tuple[float, float]]:
        """Return when whole pipelines have finished the step: their own share, reassigned microbatches, the reduction.

        Returns also when they began and ended to wait, after their own share, for orders and groups.
        """
        assert self.plan is not None
        extra: dict[int, int] = defaultdict(int)
        for segment in update.segments:
            extra[segment.pipeline] += len(segment.microbatches)
        broken = broken_pipelines(self.plan, update.lost)
        shares = shares_of(self.plan, self._partial.microbatches)
        seconds: dict[Hashable, tuple[float, float]] = {}
        for index, (pipeline, kind) in enumerate(zip(self.plan.pipelines, self.schedules, strict=True)):
            own = len(shares[index])
            # Without slow nodes, pipelines of one template take equally long.
            key = index if self.factors else (id(pipeline.template), own, extra[index], kind)
            if index not in broken and key not in seconds:
                own_s = self._pace.compute_s(pipeline, own, self.factors, kind)
                seconds[key] = own_s, self._pace.compute_s(pipeline, extra[index], self.factors, kind)
        computed_s = self._began_s + max(own_s for own_s, _ in seconds.values())
        # Reassigned microbatches are a separate program, which needs orders and new groups.
        formed_s = max(computed_s, ordered_s) + forming_s
        extra_s = max(extra_s for _, extra_s in seconds.values())
        committing_s = self._costs.committing_s(len(self.plan.worker_ids))
        end_s = formed_s + extra_s + self._pace.reduce_s(self.plan) + committing_s
        return end_s, (computed_s, formed_s)

    def _adopt(self, pending: _Pending) -> None:
        update = pending.update
        self._pending, self._stopped_s = None, None
        self.plan, self._adopted, self._applied = update.plan, update.generation, update.boundary
        self.schedules = update.schedules
        self._teams = _teams(update.plan)
        self._partial, self._num_sections, self._number = update.partial, update.num_sections, 0
        self._set_pace(update.plan)
        self._began_s = pending.adopt_s
        # Each worker's report once it has adopted the plan, except for the bytes that it received.
        self.resumed = protocol.Resumed(
            device=0,
            generation=update.generation,
            transfer_s=pending.transfer_s,
            received_bytes=0,
            resumed_s=pending.adopt_s,
            busy_s=without(self._busy_s, pending.waits_s),
        )
        self._busy_s = (pending.adopt_s, pending.adopt_s)

    def disband(self) -> None:
        """Lose all state: the next plan starts from a checkpoint."""
        self.plan, self._teams, self._pending, self._stopped_s = None, {}, None, None
        self._adopted, self.last_record, self.step_s = 0, None, inf
        self._partial, self._number = protocol.NOTHING, 0


def _teams(plan: ExecutionPlan) -> Mapping[tuple[tuple[int, ...], int], tuple[WorkerId, ...]]:
    """Return a plan's workers by the layers that they hold and the microbatches that they take; O(workers)."""
    alike: dict[tuple[int, int], list[Pipeline]] = defaultdict(list)
    for pipeline in plan.pipelines:
        alike[id(pipeline.template), pipeline.num_microbatches].append(pipeline)
    teams: dict[tuple[tuple[int, ...], int], list[WorkerId]] = defaultdict(list)
    for (_, num_microbatches), pipelines in alike.items():
        for stages in zip(*[pipeline.stages for pipeline in pipelines], strict=True):
            team = teams[stages[0].layers, num_microbatches]
            team.extend(chain.from_iterable([stage.worker_ids for stage in stages]))
    return {key: tuple(worker_ids) for key, worker_ids in teams.items()}
