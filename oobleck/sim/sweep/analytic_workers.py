"""The workers of all nodes at once: they move in step, so one state stands for all of them.

Where workers of the cluster mode compute and wait one by one, here the moments that matter are computed: when
steps are committed, when the step in flight is finished, when a plan is adopted. In between nothing happens.

    STOPPED ── a plan ──> FINISHING (the step in flight) ──> ADOPTING (groups, layers) ──> TRAINING
       ^                         │ a fence                        │ a fence                     │ a loss, a fence
       └─────────────────────────┴────────────────────────────────┴─────────────────────────────┘

This is a closed form of what `control.commit.follower` does, and no driver of it: that would take every move of every
worker. What ties the two is a property (`test_the_journal_of_a_cluster_run_gives_the_same_plans_in_the_sweep_mode` in
`tests/sim/test_modes.py`). Who takes which microbatches, and where sections end, `control.plans.sections` says for
both."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import inf

from oobleck.control import protocol
from oobleck.control.plans import num_sections_of, shares_of
from oobleck.control.steps import broken_pipelines, without
from oobleck.planner import ExecutionPlan, Pipeline, WorkerId
from oobleck.schedule import ScheduleKind, section_stops
from oobleck.sim.costs import Costs, NodeKinds, StepTimes

_NEARLY = 1e-9
"""A step that lacks less than this share of itself is complete: times are sums of floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedSteps:
    """Steps committed one after the other, under one plan at one pace."""

    first_step: int
    last_step: int
    end_s: float
    step_s: float
    generation: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A plan update that is being carried out."""

    update: protocol.PlanUpdate
    commit_s: float
    """When the step in flight is committed; the time of the update where none is finished."""
    adopt_s: float
    transfer_s: float
    waits_s: tuple[float, float]
    """From when to when all who had computed their own share of that step waited for the orders, and formed groups."""


class AnalyticWorkers:
    """All that the sweep mode knows of workers. Times only go forward."""

    def __init__(self, kinds: NodeKinds, *, num_samples: int, most_steps: int, costs: Costs) -> None:
        self.max_steps = most_steps
        self._num_samples = num_samples
        self._costs = costs
        self._pace = StepTimes(kinds.profile, profile_of=kinds.own_profile_of)
        self.plan: ExecutionPlan | None = None
        """The plan in force; None before the first, and after all state was lost."""
        self._schedules: tuple[ScheduleKind, ...] = ()
        """Of the pipelines of the plan in force."""
        self._teams: Mapping[tuple[tuple[int, ...], int], tuple[WorkerId, ...]] = {}
        """The workers of the plan in force, by what they hold and the microbatches that they take."""
        self._adopted = 0
        self._applied = 0
        self.last_record: protocol.CommitRecord | None = None
        self._began_s = 0.0
        self.step_s = inf
        """What a step takes under the plan in force; infinity without one."""
        self._partial: protocol.PartialStep = protocol.NOTHING
        """What of the step in flight was committed before the plan in force; only a plan's first step has any."""
        self._num_sections = 1
        self._rest_s = inf
        """What that step takes under the plan."""
        self._number = 0
        """Sections of the step in flight that are committed since, when a fence was answered last."""
        self.factors: dict[str, float] = {}
        """How many times the usual time slow nodes take."""
        self._stopped_s: float | None = None
        """Since then nothing can be committed."""
        self._pending: _Pending | None = None
        self._busy_s: tuple[float, float] = (0.0, 0.0)
        """When anybody last computed for a step that was committed."""

    def set_factor(self, node: str, factor: float, now_s: float) -> None:
        """Let a node be slower from now on. The share of the step in flight that is done stays done."""
        if factor == 1.0:
            self.factors.pop(node, None)
        else:
            self.factors[node] = factor
        if self.plan is not None and self._pending is None:
            until_s = now_s if self._stopped_s is None else self._stopped_s
            done = (until_s - self._began_s) / self._this_s
            self.step_s = self._whole_step_s(self.plan)
            self._rest_s = self._rest_of_step_s(self.plan) if self._partial.microbatches else self.step_s
            self._began_s = until_s - done * self._this_s

    def forget(self, node: str) -> None:
        """A node is gone: who comes back in its name is as fast as any."""
        self.factors.pop(node, None)

    def stop(self, now_s: float) -> None:
        """From now on nothing is committed: somebody that all wait for is gone. Whole pipelines compute on."""
        if self._stopped_s is None:
            self._stopped_s = now_s

    def go_on(self, now_s: float) -> None:
        """Those who were waited for are back, as if nothing had happened."""
        if self._stopped_s is not None:
            self._began_s += now_s - self._stopped_s
            self._stopped_s = None

    def is_training(self, node: str) -> bool:
        """Return whether all workers wait for a node that stops."""
        plans = [self.plan, self._pending.update.plan if self._pending else None]
        return any(plan is not None and node in plan.nodes for plan in plans)

    @property
    def is_computing(self) -> bool:
        """Steps are committed: no worker is waited for, and no plan is on its way."""
        return self.plan is not None and self._pending is None and self._stopped_s is None

    @property
    def has_finished(self) -> bool:
        """All steps are committed, and the plan in force has nothing more to do."""
        return self.plan is not None and self._pending is None and self._applied >= self.max_steps

    def speaker(self, is_heard: Callable[[str], bool]) -> WorkerId | None:
        """A worker of the plan in force that can report commits: its node is heard."""
        worker_ids = chain.from_iterable(self._teams.values())
        return next((worker_id for worker_id in worker_ids if is_heard(worker_id.node)), None)

    @property
    def next_s(self) -> float:
        """When an update under way is carried out, or the last step committed; infinity where nothing leads there."""
        if self._pending is not None:
            return self._pending.adopt_s
        if self.plan is None or self._stopped_s is not None or self.has_finished:
            return inf
        return self._began_s + (self.max_steps - self._applied) * self.step_s

    def advance(self, now_s: float) -> Iterator[CommittedSteps]:
        """Let time pass up to `now_s`: yield the steps committed since the last call, at most two stretches."""
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
        """Return what workers answer to a fence: (workers, status), alike ones together.

        `silent` are nodes that answer nothing, `idle` workers that have no part in the plan in force.
        """
        self.stop(now_s)
        if self._pending is None:
            self._number = self._sections_committed()
        else:
            if self._applied == self._pending.update.boundary:
                self._began_s = now_s  # nothing of the next step was computed while layers were exchanged
            self._pending = None
        answers: list[tuple[tuple[WorkerId, ...], protocol.Status]] = []
        done = max(0.0, min(1.0, (now_s - self._began_s) / self._this_s)) if self.plan is not None else 0.0
        partial = self._section_record()
        for (layers, num_microbatches), worker_ids in self._teams.items():
            heard = tuple([each for each in worker_ids if each.node not in silent]) if silent else worker_ids
            if heard:
                answers.append((heard, self._status(generation, layers, int(done * num_microbatches), partial)))
        if idle:
            answers.append((tuple(idle), self._status(generation, (), 0, None)))
        return answers

    @property
    def _this_s(self) -> float:
        """What the step in flight takes in all under the plan in force."""
        return self._rest_s if self._partial.microbatches else self.step_s

    def _whole_step_s(self, plan: ExecutionPlan) -> float:
        return self._pace.step_s(plan, self.factors, self._schedules) + self._committing_s(plan)

    def _committing_s(self, plan: ExecutionPlan) -> float:
        return self._costs.committing_s(len(plan.worker_ids))

    def _rest_of_step_s(self, plan: ExecutionPlan) -> float:
        shares = shares_of(plan, self._partial.microbatches)
        ends_s = (
            self._pace.compute_s(pipeline, len(share), self.factors, kind)
            for pipeline, share, kind in zip(plan.pipelines, shares, self._schedules, strict=True)
        )
        return max(ends_s) + self._pace.reduce_s(plan) + self._committing_s(plan)

    def _sections_committed(self) -> int:
        """How many sections were committed of the step in flight before all stopped.

        One is when the last pipeline has taken the last microbatch of it backward, and the sums were made.
        """
        plan = self.plan
        if plan is None or self._num_sections == 1:
            return 0
        assert self._stopped_s is not None
        shares = shares_of(plan, self._partial.microbatches)
        number = num_sections_of(plan, self._partial.microbatches, self._num_sections)
        stops = [
            section_stops(len(share), number, round_size=pipeline.template.round_size)
            for pipeline, share in zip(plan.pipelines, shares, strict=True)
        ]
        ends_s = [
            max(
                self._pace.compute_s(pipeline, stop[section], self.factors, kind)
                for pipeline, stop, kind in zip(plan.pipelines, stops, self._schedules, strict=True)
            )
            + self._pace.reduce_s(plan)
            for section in range(number - 1)
        ]
        return bisect_right(ends_s, self._stopped_s - self._began_s)

    def _section_record(self) -> protocol.SectionRecord | None:
        if not self._number:
            return None
        return protocol.SectionRecord(step=self._applied + 1, generation=self._adopted, number=self._number, loss=0.0)

    def _status(
        self, generation: int, layers: tuple[int, ...], microbatches_done: int, partial: protocol.SectionRecord | None
    ) -> protocol.Status:
        return protocol.Status(
            device=0,
            generation=generation,
            applied=self._applied,
            last_record=self.last_record,
            reduced=None,
            adopted=self._adopted if layers else 0,
            layers=layers,
            microbatches_done=microbatches_done,
            broken=False,
            partial=partial,
        )

    def take_update(self, update: protocol.PlanUpdate, now_s: float, *, transfer_s: float) -> None:
        """Begin to carry out a plan update; `transfer_s` is what copying its layers takes."""
        # A worker's groups are that of all workers and that of its layers' owners; its pipeline's is mostly kept.
        owners = len(update.plan.pipelines)
        forming_s = self._costs.forming_s((len(update.plan.worker_ids), owners))
        commit_s, waits_s = now_s, (now_s, now_s)
        if update.finish is not None:  # that of all is formed for this step already, and those of owners differ
            commit_s, waits_s = self._finished_s(update, now_s, forming_s)
            forming_s = self._costs.forming_s((owners,))
        adopt_s = commit_s + forming_s + transfer_s + self._costs.warm_up_s
        self._pending = _Pending(update, commit_s, adopt_s, transfer_s, waits_s)

    def _finished_s(
        self, update: protocol.PlanUpdate, ordered_s: float, forming_s: float
    ) -> tuple[float, tuple[float, float]]:
        """When the whole pipelines have computed their share of the step, what was reassigned to them, and reduced.

        Returns as well from when to when all of them waited for orders, and for the groups that all form together once
        they have computed their own share.
        """
        assert self.plan is not None
        extra: dict[int, int] = defaultdict(int)
        for segment in update.segments:
            extra[segment.pipeline] += len(segment.microbatches)
        broken = broken_pipelines(self.plan, update.lost)
        shares = shares_of(self.plan, self._partial.microbatches)
        seconds: dict[Hashable, tuple[float, float]] = {}
        for index, (pipeline, kind) in enumerate(zip(self.plan.pipelines, self._schedules, strict=True)):
            own = len(shares[index])
            key = index if self.factors else (id(pipeline.template), own, extra[index], kind)
            if index not in broken and key not in seconds:
                own_s = self._pace.compute_s(pipeline, own, self.factors, kind)
                seconds[key] = own_s, self._pace.compute_s(pipeline, extra[index], self.factors, kind)
        computed_s = self._began_s + max(own_s for own_s, _ in seconds.values())
        formed_s = max(computed_s, ordered_s) + forming_s
        extra_s = max(extra_s for _, extra_s in seconds.values())
        end_s = formed_s + extra_s + self._pace.reduce_s(self.plan) + self._committing_s(self.plan)
        return end_s, (computed_s, formed_s)

    def _adopt(self, pending: _Pending) -> None:
        update = pending.update
        self._pending, self._stopped_s = None, None
        self.plan, self._adopted, self._applied = update.plan, update.generation, update.boundary
        self._schedules = update.schedules
        self._teams = _teams(update.plan)
        self._partial, self._num_sections, self._number = update.partial, update.num_sections, 0
        self.step_s = self._whole_step_s(update.plan)
        self._rest_s = self._rest_of_step_s(update.plan) if self._partial.microbatches else self.step_s
        self._began_s = pending.adopt_s
        # What each worker says once it has adopted the plan; the bytes are not assigned to any.
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
        """All state is lost: what comes next starts from a checkpoint."""
        self.plan, self._teams, self._pending, self._stopped_s = None, {}, None, None
        self._adopted, self.last_record, self.step_s = 0, None, inf
        self._partial, self._number = protocol.NOTHING, 0


_Answers = list[tuple[tuple[WorkerId, ...], protocol.Status]]


def _teams(plan: ExecutionPlan) -> Mapping[tuple[tuple[int, ...], int], tuple[WorkerId, ...]]:
    """All workers of a plan, by what they hold and the microbatches that they take; O(workers)."""
    alike: dict[tuple[int, int], list[Pipeline]] = defaultdict(list)
    for pipeline in plan.pipelines:
        alike[id(pipeline.template), pipeline.num_microbatches].append(pipeline)
    teams: dict[tuple[tuple[int, ...], int], list[WorkerId]] = defaultdict(list)
    for (_, num_microbatches), pipelines in alike.items():
        for stages in zip(*[pipeline.stages for pipeline in pipelines], strict=True):
            team = teams[stages[0].layers, num_microbatches]
            team.extend(chain.from_iterable([stage.worker_ids for stage in stages]))
    return {key: tuple(worker_ids) for key, worker_ids in teams.items()}
