"""A step of a virtual worker: the follower's effects on the step and its sections, as moves in virtual time."""

from __future__ import annotations

from collections.abc import Generator
from typing import assert_never

from oobleck.control import steps
from oobleck.control.protocol import CommitRecord, RecordRun, Tally, Totals
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan

from .agreements import VirtualAgreements
from .fabric import Contribution, Violation, Wait
from .groups import Bucket, GroupTable, NodeSums, buckets_of
from .layers import HeldLayers
from .ports import Moves, WorkerPorts, pause
from .program import Programs, Work
from .records import Records
from .sections import SectionSums

StepEffect = (
    steps.BeginStep
    | steps.Compute
    | steps.Reduce
    | steps.Agree
    | steps.Apply
    | steps.ForgetStep
    | steps.Evaluate
    | steps.SectionEffect
)


class StepDriver:
    def __init__(
        self,
        job: JobSpec,
        ports: WorkerPorts,
        commit_state: steps.CommitState,
        *,
        groups: GroupTable,
        agreements: VirtualAgreements,
        layers: HeldLayers,
        records: Records,
        programs: Programs,
        node_sums: NodeSums,
    ) -> None:
        self.seat: steps.PlaceInPlan | None = None  # None for a spare
        self.reduced: dict[int, tuple[int, ...]] = {}  # the sums to apply the step with
        self.taken: dict[int, tuple[RecordRun, ...]] = {}  # the records of each applied step
        self._job, self._ports, self._commit_state = job, ports, commit_state
        self._groups, self._agreements, self._layers = groups, agreements, layers
        self._records, self._programs, self._node_sums = records, programs, node_sums
        self._sections = SectionSums(commit_state, ports.fabric, groups, agreements, layers, num_lanes=job.num_lanes)
        # The groups that sum the gradients of the worker's layers, for the newest committee.
        self._buckets: tuple[steps.Committee, tuple[Bucket, ...]] | None = None
        self._work: Work | None = None
        self._reduce_s = self._committing_s = 0.0  # under the plan in force
        self._step_began_s = ports.clock()
        self._posted_s: float | None = None  # when the worker had finished its part of the step

    def adopt(self, plan: ExecutionPlan, seat: steps.PlaceInPlan | None, committee: steps.Committee | None) -> None:
        if self.seat is None:
            self._step_began_s, self._posted_s = self._ports.clock(), None  # the worker was a spare until now
        self.seat = seat
        self._programs.pace.adopt(len(plan.worker_ids))
        self._reduce_s = self._ports.tempo.pace.reduce_s(plan)
        self._committing_s = self._ports.tempo.costs.committing_s(len(plan.worker_ids))
        if committee is not None:
            self._sections.adopt(self._buckets_of(committee), committee, tells=self._tells)

    def groups_of(self, committee: steps.Committee) -> list[steps.GroupKey]:
        """Return the groups that sum the gradients of the worker's layers."""
        return [key for key, _ in self._buckets_of(committee)]

    def _buckets_of(self, committee: steps.Committee) -> tuple[Bucket, ...]:
        if self._buckets is None or self._buckets[0] is not committee:
            self._buckets = (
                committee,
                buckets_of(committee, self._commit_state.worker_id, degree=self._job.devices_per_stage),
            )
        return self._buckets[1]

    def do(self, effect: StepEffect) -> Generator[Wait, None, steps.EffectOutcome]:
        match effect:
            case steps.BeginStep(step=step):
                yield from self._begin_step(step)
            case steps.Compute():
                yield from self._compute(effect)
            case steps.Reduce():
                yield from self._reduce(effect)
            case steps.Agree():
                return (yield from self._agree(effect))
            case steps.Apply(record=record):
                yield from self._apply(record)
            case steps.ForgetStep():
                self._work, self.reduced = None, {}
                self._programs.forget_step()
            case steps.Evaluate():
                return (yield from self._evaluate(effect))
            case steps.PostSection(step=step, number=number):
                yield from self._post_section(step, number)
            case steps.TakeSums():
                return (yield from self._sections.take_sums())
            case steps.PostTotals():
                yield from self._sections.post_totals()
            case steps.TakeTotals():
                return (yield from self._sections.take_totals())
            case steps.Fold(record=record):
                self._sections.fold(record)
            case steps.AwaitSection():
                yield self._sections.arrival()
            case steps.GiveBack():
                mine = self._sections.give_back()
                if self._work is not None:
                    self._work.microbatches += mine
            case _:
                assert_never(effect)
        return None

    def _begin_step(self, step: int) -> Moves:
        if self._records.are_needed:
            yield Wait(
                f"the records of step {step}, to finish it",
                lambda: self._records.is_told(step),
                self._commit_state.is_pipeline_stopped,
            )
        self._work = Work(step)

    def _compute(self, program: steps.Compute) -> Moves:
        assert self._work is not None
        assert self.seat is not None
        self._records.read(program.step)
        yield from self._programs.execute(self._work, self.seat, program)

    def _reduce(self, effect: steps.Reduce) -> Moves:
        assert self._work is not None
        mine, step = tuple(self._work.microbatches), effect.step
        # Owners of a layer that took other records would sum other gradients.
        runs = hash(self._records.runs_of(step))
        posted = [
            (key, layers, self._groups.post(key, Contribution(step, mine, (*self._layers.digests(layers), runs))))
            for key, layers in self._buckets_of(effect.committee)
        ]
        yield from pause("posted the reductions")
        self.reduced = {}
        takes_s = self._reduce_s
        for key, layers, sequence in posted:
            summed = yield from self._groups.sum(key, sequence, step, takes_s=takes_s)
            self.reduced.update(dict.fromkeys(layers, summed))
            takes_s = 0.0  # the seconds of the first sum cover all
        yield from pause("reduced")

    def _agree(self, effect: steps.Agree) -> Generator[Wait, None, steps.Agreed]:
        assert self._work is not None
        yield from pause("about to commit")
        committee, step, saver = effect.committee, effect.step, self._ports.saver
        self._posted_s = self._ports.clock()
        numbers = (
            float(effect.stop),
            float(saver is not None and saver.is_wanted(step)),
            self._posted_s - self._step_began_s,
        )
        part = Totals(numbers, Tally.of(self._work.microbatches if self._tells else (), num_lanes=self._job.num_lanes))
        total = yield from self._agreements.total(committee, effect.subject, part, takes_s=self._committing_s)
        yield from pause("agreed to commit")
        stops, saves, took_s = total.numbers
        record = CommitRecord(
            step=step,
            generation=committee.generation,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=1.0,
            num_samples=self._job.global_batch_size,
            samples_repeated=0,
            samples_missing=0,
            # An agreement adds numbers up, and a record has the members' mean.
            duration_s=took_s / len(committee.members),
        )
        return steps.Agreed(record, total.counted, stop=stops > 0, save=saves > 0)

    @property
    def _tells(self) -> bool:
        # A pipeline's last stage has the losses, so it reports the microbatches: one of its devices those of all.
        is_first_device = self._commit_state.worker_id.device % self._job.devices_per_stage == 0
        return self.seat is not None and self.seat.is_last and is_first_device

    def _apply(self, record: CommitRecord) -> Moves:
        if runs := self._records.runs_of(record.step):
            self.taken[record.step] = runs
        yield from pause("applying")
        self._layers.apply(self.reduced, record)
        # The next step begins when the worker has done its part of this one, not when all agree.
        self._step_began_s, self._posted_s = self._posted_s or self._ports.clock(), None
        self._programs.end_step()
        if (pace := self._programs.pace.take(self._ports.clock())) is not None:
            self._ports.say(pace)

    def _evaluate(self, effect: steps.Evaluate) -> Generator[Wait, None, steps.Evaluation]:
        if any(version.partial for version in self._layers.held.values()):
            raise Violation(f"{self._commit_state.worker_id} evaluates in the middle of step {effect.step + 1}")
        yield from self._node_sums.begin(effect.stage_key, effect.step, interrupted=self._commit_state.is_fenced)
        yield from self._agreements.total(effect.committee, effect.subject, Totals(()))
        # The time of an evaluation is not the next step's.
        self._step_began_s, self._posted_s = self._ports.clock(), None
        return steps.Evaluation(loss=1.0, num_samples=self._job.microbatch_size, duration_s=0.0)

    def _post_section(self, step: int, number: int) -> Moves:
        yield from pause("about to post a section")
        assert self._work is not None
        mine, self._work.microbatches = tuple(self._work.microbatches), []
        self._sections.post(number, step, mine)
