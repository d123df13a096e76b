"""Virtual workers: drivers of the follower and its `CommitState`, like `training.step.engine`, in virtual time.

What is done, and in which order, is `control.commit.follower`'s. Here each effect becomes moves: the training thread is
a generator that yields wherever the real one may be preempted or has to wait, so that the caller of `step` chooses the
interleaving. What must never happen, such as a layer that no worker sent, raises `Violation` on the spot."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import assert_never

from oobleck.control.commit import (
    FAILURES,
    Adopt,
    Agree,
    Agreed,
    Apply,
    AwaitPlanUpdate,
    AwaitRecords,
    AwaitSection,
    BeginStep,
    CommitState,
    Committee,
    CompareReplicas,
    Compute,
    Effect,
    Effects,
    Evaluate,
    Evaluation,
    Exchange,
    Fold,
    Follower,
    ForgetStep,
    FormGroups,
    GiveBack,
    GroupKey,
    Interrupted,
    KeepGroups,
    Outcome,
    PeerLost,
    PlaceInPlan,
    PostSection,
    PostTotals,
    PrepareToSave,
    ReadCheckpoint,
    Reduce,
    ReportFinished,
    ReportResumed,
    Save,
    SaveEnd,
    Say,
    SectionEffect,
    ShareLossScale,
    TakeSums,
    TakeTotals,
)
from oobleck.control.protocol import (
    CommitRecord,
    Fence,
    Finished,
    FinishStep,
    PeerFailed,
    PlanOrder,
    PlanUpdate,
    RecordRun,
    RecordsFailed,
    RecordsOver,
    Resumed,
    ScanAnswer,
    ScanRequest,
    StepRecords,
    StoreKeys,
    WorkerBound,
    WorkerMessage,
)
from oobleck.job import JobSpec
from oobleck.planner import WorkerId

from .buckets import Bucket, buckets_of
from .fabric import Contribution, Fabric, Violation, Wait
from .groups import GroupTable
from .layers import HeldLayers, Version
from .moves import Moves, pause
from .program import Programs, Work
from .records import Records
from .sections import SectionSums
from .shards import VirtualShards
from .tempo import Tempo
from .transfer import Transfers

__all__ = ["VirtualWorker"]

_STOP = -1
"""What a commit's contribution contains, beside microbatches, of a worker that is to stop."""


class VirtualWorker:
    """One worker process. `step` makes the training thread's next move, `take` a message of the control thread."""

    programs: type[Programs] = Programs
    """What runs its programs."""

    def __init__(
        self,
        worker_id: WorkerId,
        job: JobSpec,
        fabric: Fabric,
        say: Callable[[WorkerMessage], None],
        *,
        tempo: Tempo,
        clock: Callable[[], float],
        announce: Callable[[], None] = lambda: None,
        shards: VirtualShards | None = None,
    ) -> None:
        """`clock` gives seconds; `announce` is called when a message changes what a wait may look for.

        `shards` are those of the job where others than endless ones are wanted.
        """
        self.worker_id = worker_id
        self.commit_state = CommitState(worker_id, announce, lock=nullcontext())
        self.is_stuck = False
        """The process is stopped: neither of its threads does anything, and its connections do not show it."""
        self.taken: dict[int, tuple[RecordRun, ...]] = {}
        """The records of the steps that it has applied."""
        self._job = job
        self._say = say
        self._tempo = tempo
        self._clock = clock
        self._announce = announce
        self._records = Records(shards or VirtualShards.of(job), items=job.data.sequence_length - 1)
        self._layers = HeldLayers(worker_id, num_microbatches=job.num_microbatches)
        self._groups = GroupTable(fabric, self.commit_state, put=say, form_group_s=tempo.form_group_s)
        self._transfers = Transfers(fabric, self.commit_state, tempo=tempo, clock=clock)
        self._follower = Follower(
            job,
            self.commit_state,
            records=self._records if self._records.are_needed else None,
            evaluates=True,
        )
        self._sections = SectionSums(self.commit_state, fabric, self._groups, self._layers)
        self._programs = self.programs(
            fabric,
            self.commit_state,
            self._follower.partial_commit,
            tempo=tempo,
            clock=clock,
            carry_out=self._carry_out,
        )
        self._seat: PlaceInPlan | None = None
        """In the plan in force; None for a spare."""
        self._buckets: tuple[Committee, tuple[Bucket, ...]] | None = None
        """The groups in which the gradients of its layers are summed, those of the newest committee."""
        self._work: Work | None = None
        self._received: dict[int, Version] = {}
        self._reduced: dict[int, tuple[int, ...]] = {}
        self._reduce_s = 0.0
        """How long that takes under the plan in force."""
        self._step_ended_s = clock()
        self._thread = self._carry_out(self._follower.run())
        self.wait = next(self._thread)

    # --- what the environment does ---------------------------------------------------------------------------

    def take(self, message: WorkerBound) -> None:
        """Handle one message, as the control thread does."""
        if self.is_stuck:
            return
        match message:
            case StoreKeys(keys=keys):
                for key, _ in keys:
                    self._groups.read(key)
                self._announce()
            case Fence():
                self._programs.note_microbatches()
                self._say(self.commit_state.answer(message))
            case PlanOrder():
                if (needed := self.commit_state.give_order(message)) is not None:
                    self._say(needed)
            case FinishStep():
                self.commit_state.want_stop()
            case ScanRequest(request=request, wants=wants):
                found = self._records.survey(wants)
                self._say(ScanAnswer(device=self.worker_id.device, request=request, found=found))
            case StepRecords():
                self._records.tell(message)
                self._announce()
            case RecordsOver():
                self._records.end(message)
                self._announce()
            case _:
                raise Violation(f"{self.worker_id} received {message}")

    @property
    def layers(self) -> dict[int, Version]:
        """What it holds under the plan in force."""
        return self._layers.held

    @property
    def kept(self) -> dict[int, Version]:
        """Layers of the plan before, until all have adopted the new one."""
        return self._layers.kept

    @property
    def holds_reduced(self) -> bool:
        """It can still apply the step that its peers may have applied."""
        return bool(self._reduced)

    @property
    def is_settled(self) -> bool:
        """Its layers are what it answers that they are, not about to become so."""
        return self.wait.what not in ("adopting", "applying")

    @property
    def can_step(self) -> bool:
        return not self.is_stuck and (self.wait.ready() or self.wait.interrupted())

    def step(self) -> None:
        """Continue to the next point where the training thread may be preempted or has to wait."""
        self.wait = next(self._thread) if self.wait.ready() else self._thread.throw(Interrupted())

    def fail(self) -> None:
        """End the wait with an error of the network."""
        self.wait = self._thread.throw(PeerLost(self.wait.what))

    # --- the training thread: effects become moves -------------------------------------------------------------

    def _carry_out(self, effects: Effects) -> Moves:
        """Carry effects out, one after the other; what fails is for the follower to handle."""
        outcome: Outcome = None
        failure: Exception | None = None
        while True:
            try:
                effect = effects.send(outcome) if failure is None else effects.throw(failure)
            except StopIteration:
                return
            outcome, failure = None, None
            try:
                outcome = yield from self._do(effect)
            except FAILURES as error:
                failure = error

    def _do(self, effect: Effect) -> Generator[Wait, None, Outcome]:
        match effect:
            case Compute():
                yield from self._compute(effect)
            case Reduce():
                yield from self._reduce(effect)
            case Agree():
                return (yield from self._agree(effect))
            case Apply(record=record):
                yield from self._apply(record)
            case ForgetStep():
                self._work, self._reduced = None, {}
                self._programs.forget_step()
            case BeginStep(step=step):
                yield from self._begin_step(step)
            case Say(message=message):
                if isinstance(message, PeerFailed | RecordsFailed):
                    yield from pause("report")
                self._say(message)
            case Save() | SaveEnd() | PrepareToSave() | CompareReplicas() | ShareLossScale():
                pass  # nothing is saved on virtual nodes, and layers have no numbers
            case ReportResumed(generation=generation):
                self._report_resumed(generation)
            case ReportFinished():
                self._say(Finished(device=self.worker_id.device, applied=self.commit_state.applied))
            case AwaitPlanUpdate():
                return (yield from self._await_update())
            case AwaitRecords(step=step):
                yield Wait(
                    f"the records of step {step}",
                    lambda: self._records.is_told(step) or self._records.over_after(step - 1) is not None,
                    self.commit_state.is_fenced,
                )
            case Evaluate():
                return (yield from self._evaluate(effect))
            case FormGroups(keys=keys, committee=committee):
                yield from self._groups.form(self._with_buckets(keys, committee))
            case KeepGroups(keys=keys, committee=committee):
                self._groups.keep(self._with_buckets(keys, committee))
            case Exchange(update=update):
                self._received = yield from self._transfers.exchange(update, self._layers)
                yield from pause("about to adopt")
            case Adopt():
                yield from self._adopt(effect)
            case ReadCheckpoint():
                raise Violation(f"{self.worker_id} has nothing to restore from: nothing is saved on virtual nodes")
            case PostSection() | TakeSums() | PostTotals() | TakeTotals() | Fold() | AwaitSection() | GiveBack():
                return (yield from self._move_section(effect))
            case _:
                assert_never(effect)
        return None

    def _await_update(self) -> Generator[Wait, None, PlanUpdate]:
        yield Wait("an order", lambda: self.commit_state.has_update)
        update = self.commit_state.take_update()
        assert update is not None
        yield from pause("took an order")
        return update

    def _report_resumed(self, generation: int) -> None:
        self._say(
            Resumed(
                device=self.worker_id.device,
                generation=generation,
                transfer_s=self._transfers.took_s,
                received_bytes=self._transfers.received_bytes,
                resumed_s=self._clock(),
                busy_s=self._programs.busy_s,
            )
        )

    # --- a step ----------------------------------------------------------------------------------------------

    def _begin_step(self, step: int) -> Moves:
        if self._records.are_needed:
            yield Wait(
                f"the records of step {step}, to finish it",
                lambda: self._records.is_told(step),
                self.commit_state.is_pipeline_stopped,
            )
        self._work = Work(step)

    def _compute(self, program: Compute) -> Moves:
        assert self._work is not None
        assert self._seat is not None
        self._records.read(program.step)
        yield from self._programs.execute(self._work, self._seat, program)

    def _reduce(self, effect: Reduce) -> Moves:
        assert self._work is not None
        mine, step = tuple(self._work.microbatches), effect.step
        runs = hash(self._records.runs_of(step))
        posted = [
            (key, layers, self._groups.post(key, Contribution(step, mine, (*self._layers.digests(layers), runs))))
            for key, layers in self._buckets_of(effect.committee)
        ]
        yield from pause("posted the reductions")
        self._reduced = {}
        takes_s = self._reduce_s
        for key, layers, sequence in posted:
            summed = yield from self._groups.sum(key, sequence, step, takes_s=takes_s)
            self._reduced.update(dict.fromkeys(layers, summed))
            takes_s = 0.0  # those of the first one cover all
        yield from pause("reduced")

    def _agree(self, effect: Agree) -> Generator[Wait, None, Agreed]:
        assert self._work is not None
        yield from pause("about to commit")
        key, step = effect.committee.key, effect.step
        mine = tuple(self._work.microbatches) if self._tells else ()
        sequence = self._groups.post(key, Contribution(step, (*((_STOP,) if effect.stop else ()), *mine)))
        said = yield from self._groups.sum(key, sequence, step)
        yield from pause("agreed to commit")
        num_stops = said.count(_STOP)
        return Agreed(self._record(step, key.generation), said[num_stops:], stop=num_stops > 0, save=False)

    @property
    def _tells(self) -> bool:
        """It reports microbatches: of a pipeline's stages, the last one knows of losses."""
        return self._seat is not None and self._seat.is_last

    def _record(self, step: int, generation: int) -> CommitRecord:
        return CommitRecord(
            step=step,
            generation=generation,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=1.0,
            num_samples=self._job.global_batch_size,
            samples_repeated=0,
            samples_missing=0,
            duration_s=self._clock() - self._step_ended_s,
        )

    def _apply(self, record: CommitRecord) -> Moves:
        if runs := self._records.runs_of(record.step):
            self.taken[record.step] = runs
        yield from pause("applying")
        self._layers.apply(self._reduced, record)
        self._step_ended_s = self._clock()
        self._programs.end_step()
        if (pace := self._programs.take_pace()) is not None:
            self._say(pace)

    def _evaluate(self, effect: Evaluate) -> Generator[Wait, None, Evaluation]:
        """All sum their losses, which takes no time here."""
        if any(version.partial for version in self.layers.values()):
            raise Violation(f"{self.worker_id} evaluates in the middle of step {effect.step + 1}")
        key = effect.committee.key
        sequence = self._groups.post(key, Contribution(effect.step, ()))
        yield from self._groups.sum(key, sequence, effect.step)
        self._step_ended_s = self._clock()
        return Evaluation(loss=1.0, num_samples=self._job.microbatch_size, duration_s=0.0)

    def _move_section(self, effect: SectionEffect) -> Generator[Wait, None, Outcome]:
        match effect:
            case PostSection(step=step, number=number):
                yield from pause("about to post a section")
                assert self._work is not None
                mine, self._work.microbatches = tuple(self._work.microbatches), []
                self._sections.post(number, step, mine)
            case TakeSums():
                return (yield from self._sections.take_sums())
            case PostTotals():
                yield from self._sections.post_totals()
            case TakeTotals():
                return (yield from self._sections.take_totals())
            case Fold(record=record):
                self._sections.fold(record)
            case AwaitSection():
                yield self._sections.arrival()
            case GiveBack():
                mine = self._sections.give_back()
                if self._work is not None:
                    self._work.microbatches += mine
            case _:
                assert_never(effect)
        return None

    # --- from one plan to the next ---------------------------------------------------------------------------

    def _with_buckets(self, keys: tuple[GroupKey, ...], committee: Committee | None) -> list[GroupKey]:
        return [*keys, *([] if committee is None else (key for key, _ in self._buckets_of(committee)))]

    def _buckets_of(self, committee: Committee) -> tuple[Bucket, ...]:
        if self._buckets is None or self._buckets[0] is not committee:
            self._buckets = committee, buckets_of(committee, self.worker_id)
        return self._buckets[1]

    def _adopt(self, effect: Adopt) -> Moves:
        yield from pause("adopting")
        update, wanted = effect.update, tuple(effect.layers)
        keeping = self._layers.states(effect.keep)
        self._layers.adopt(wanted, self._received, keeping, initial=update.initial)
        self._records.assignment_version = update.assignment_version
        if self._seat is None:
            self._step_ended_s = self._clock()  # it has rested until now
        self._seat, self._received = effect.seat, {}
        self._reduce_s = self._tempo.reduce_s(update.plan)
        if effect.committee is not None:
            self._sections.adopt(self._buckets_of(effect.committee), effect.committee.key, tells=self._tells)
        for layer, version in self.layers.items():
            if version.partial != update.partial.microbatches:
                raise Violation(
                    f"{self.worker_id} adopts layer {layer} with {version.partial} committed, not {update.partial}"
                )
