"""Virtual workers: drivers of the follower and its `CommitState`, like `training.step.engine`, in virtual time.

`control.commit.follower` says what is done, and in which order. Here each effect becomes moves: the training thread is
a generator that yields wherever the real one may be preempted or has to wait, so that the caller of `step` chooses the
interleaving. What must never happen, such as a layer that no worker sent, raises `Violation` on the spot."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import replace
from typing import assert_never

from oobleck.control.commit import (
    FAILURES,
    Adopt,
    Agree,
    Agreements,
    Apply,
    AwaitGroups,
    AwaitPlanUpdate,
    AwaitRecords,
    AwaitSection,
    BeginStep,
    CommitState,
    Committee,
    CompareReplicas,
    Compute,
    EffectOutcome,
    EndTransfers,
    Evaluate,
    Exchange,
    Fold,
    Follower,
    ForgetStep,
    FormGroups,
    GiveBack,
    GroupKey,
    Interrupted,
    KeepGroups,
    PeerLost,
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
    ShareLossScale,
    TakeSums,
    TakeTotals,
    WorkerEffect,
    WorkerEffects,
)
from oobleck.control.protocol import (
    Activity,
    AskActivity,
    CommitMessage,
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
    SaveState,
    ScanAnswer,
    ScanRequest,
    StepRecords,
    Totals,
    UseShare,
    WorkerAddress,
    WorkerBound,
)
from oobleck.job import JobSpec
from oobleck.planner import WorkerId

from .agreements import VirtualAgreements
from .fabric import Violation, Wait
from .groups import GroupTable
from .layers import HeldLayers, Version
from .moves import Moves, pause
from .ports import WorkerPorts
from .program import Programs
from .records import Records, VirtualShards
from .step import StepDriver
from .transfer import Transfers


class VirtualWorker:
    """One worker process. `step` makes the training thread's next move, `take` a message of the control thread."""

    programs: type[Programs] = Programs
    """What runs its programs."""

    def __init__(
        self, worker_id: WorkerId, job: JobSpec, ports: WorkerPorts, *, shards: VirtualShards | None = None
    ) -> None:
        """`shards` are those of the job where others than endless ones are wanted."""
        self.worker_id = worker_id
        self.commit_state = CommitState(worker_id, ports.announce, lock=nullcontext())
        self.is_stuck = False
        """The process is stopped: neither of its threads does anything, and its connections do not show it."""
        self._ports = ports
        self._job = job
        self._records = Records(shards or VirtualShards.of(job), items=job.data.sequence_length - 1)
        self._layers = HeldLayers(worker_id, num_microbatches=job.num_microbatches)
        self._groups = GroupTable(ports.fabric, self.commit_state, tempo=ports.tempo, clock=ports.clock)
        self._transfers = Transfers(ports.fabric, self.commit_state, tempo=ports.tempo, clock=ports.clock)
        self._follower = Follower(
            job,
            self.commit_state,
            records=self._records if self._records.are_needed else None,
            evaluates=True,
        )
        agreements = Agreements(worker_id, lock=nullcontext())
        self._agreements = VirtualAgreements(agreements, self.commit_state, ports.fabric, ports.carry)
        self._programs = self.programs(
            ports.fabric,
            self.commit_state,
            self._follower.partial_commit,
            tempo=ports.tempo,
            clock=ports.clock,
            carry_out=self._carry_out,
        )
        self._step = StepDriver(
            job,
            ports,
            self.commit_state,
            groups=self._groups,
            agreements=self._agreements,
            layers=self._layers,
            records=self._records,
            programs=self._programs,
        )
        self._received: dict[int, Version] = {}
        self._given_s = 0.0
        """When the newest order came. The master decides in no time here, and its work is waited for instead."""
        self._thread = self._carry_out(self._follower.run())
        self.wait = next(self._thread)

    # --- what the environment does ---------------------------------------------------------------------------

    def take(self, message: WorkerBound) -> None:
        """Handle one message, as the control thread does."""
        if self.is_stuck:
            return
        match message:
            case Fence(probe_addresses=probed):
                self._programs.note_microbatches()
                unreachable = tuple(each.worker_id for each in probed if not self._reaches(each.worker_id))
                self._ports.say(replace(self.commit_state.answer(message), unreachable=unreachable))
            case AskActivity(inquiry=inquiry):
                self._programs.note_microbatches()
                activity = Activity(
                    device=self.worker_id.device,
                    inquiry=inquiry,
                    microbatches_done=self.commit_state.microbatches_done,
                    waits_for=(),  # a wait does not know for whom it is; that a worker computes, its agent sees
                    has_come_on=False,
                )
                self._ports.say(activity)
            case PlanOrder():
                self._given_s = self._ports.clock()
                self._groups.know(message.common.addresses)
                if (needed := self.commit_state.give_order(message)) is not None:
                    self._ports.say(needed)
            case FinishStep():
                self.commit_state.want_stop()
            case SaveState(step=step) if self._ports.saver is not None:
                self._ports.saver.want(step)
            case UseShare():
                pass  # virtual machines have cores enough
            case ScanRequest(request=request, wants=wants):
                found = self._records.survey(wants)
                self._ports.say(ScanAnswer(device=self.worker_id.device, request=request, found=found))
            case StepRecords():
                self._records.tell(message)
                self._ports.announce()
            case RecordsOver():
                self._records.end(message)
                self._ports.announce()
            case _:
                raise Violation(f"{self.worker_id} received {message}")

    def _reaches(self, other: WorkerId) -> bool:
        return self._ports.fabric.reaches(self.worker_id.node, other.node)

    def hear(self, source: WorkerId, message: CommitMessage) -> None:
        """Handle one message of another worker; like `take`, whatever the training thread does."""
        if not self.is_stuck:
            self._agreements.hear(source, message)
            self._ports.announce()

    @property
    def address(self) -> WorkerAddress:
        """Where its peers reach it."""
        return self._groups.address

    @property
    def layers(self) -> dict[int, Version]:
        """The layers that it holds under the plan in force."""
        return self._layers.held

    @property
    def kept(self) -> dict[int, Version]:
        """Layers of the plan before, until all have adopted the new one."""
        return self._layers.kept

    @property
    def holds_reduced(self) -> bool:
        """Whether it can still apply the step that its peers may have applied."""
        return bool(self._step.reduced)

    @property
    def taken(self) -> dict[int, tuple[RecordRun, ...]]:
        """The records of the steps that it has applied."""
        return self._step.taken

    @property
    def is_settled(self) -> bool:
        """Whether its layers are already those that it answers."""
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

    def _carry_out(self, effects: WorkerEffects) -> Moves:
        """Carry out effects in order; the follower handles what fails."""
        outcome: EffectOutcome = None
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

    def _do(self, effect: WorkerEffect) -> Generator[Wait, None, EffectOutcome]:
        match effect:
            case BeginStep() | Compute() | Reduce() | Agree() | Apply() | ForgetStep() | Evaluate():
                return (yield from self._step.do(effect))
            case PostSection() | TakeSums() | PostTotals() | TakeTotals() | Fold() | AwaitSection() | GiveBack():
                return (yield from self._step.do(effect))
            case Say(message=message):
                if isinstance(message, PeerFailed | RecordsFailed):
                    yield from pause("report")
                self._ports.say(message)
            case ShareLossScale(committee=committee):
                if committee is not None and self._job.dtype == "float16":
                    yield from self._agreements.total(committee, effect.subject, Totals(()))
            case Save() | SaveEnd():
                if self._ports.saver is not None:
                    self._ports.saver.save(effect)
            case PrepareToSave() | CompareReplicas():
                pass  # layers have no numbers
            case ReportResumed(generation=generation):
                self._report_resumed(generation)
            case ReportFinished():
                self._ports.say(Finished(device=self.worker_id.device, applied=self.commit_state.applied))
            case AwaitPlanUpdate():
                return (yield from self._await_update())
            case AwaitRecords(step=step):
                yield Wait(
                    f"the records of step {step}",
                    lambda: self._records.is_told(step) or self._records.over_after(step - 1) is not None,
                    self.commit_state.is_fenced,
                )
            case FormGroups(keys=keys, committee=committee):
                return (yield from self._groups.form(keys, beside=self._sum_groups(committee)))
            case AwaitGroups():
                yield from self._groups.await_formed()
            case KeepGroups(keys=keys, committee=committee):
                self._groups.keep([*keys, *self._sum_groups(committee)])
            case EndTransfers(keys=keys):
                self._groups.leave(keys)
            case Exchange(update=update):
                self._received = yield from self._transfers.exchange(update, self._layers)
                yield from pause("about to adopt")
            case Adopt():
                yield from self._adopt(effect)
            case ReadCheckpoint():
                raise Violation(f"{self.worker_id} has nothing to restore from: layers have no numbers")
            case _:
                assert_never(effect)
        return None

    def _await_update(self) -> Generator[Wait, None, PlanUpdate]:
        self._groups.abandon_forming()
        yield Wait("an order", lambda: self.commit_state.has_update)
        update = self.commit_state.take_update()
        assert update is not None
        if (takes_s := self._given_s + self._ports.tempo.ordering_s(update) - self._ports.clock()) > 0:
            yield Wait("the master's work for the order", lambda: True, takes_s=takes_s)
        yield from pause("took an order")
        return update

    def _report_resumed(self, generation: int) -> None:
        self._ports.say(
            Resumed(
                device=self.worker_id.device,
                generation=generation,
                transfer_s=self._transfers.took_s,
                received_bytes=self._transfers.received_bytes,
                resumed_s=self._ports.clock(),
                busy_s=self._programs.busy_s,
            )
        )

    # --- from one plan to the next ---------------------------------------------------------------------------

    def _sum_groups(self, committee: Committee | None) -> list[GroupKey]:
        return [] if committee is None else self._step.groups_of(committee)

    def _adopt(self, effect: Adopt) -> Moves:
        yield from pause("adopting")
        update, wanted = effect.update, tuple(effect.layers)
        keeping = self._layers.states(effect.keep)
        self._layers.adopt(wanted, self._received, keeping, initial=update.initial)
        self._records.assignment_version = update.assignment_version
        self._received = {}
        self._step.adopt(update.plan, effect.seat, effect.committee)
        for layer, version in self.layers.items():
            if version.partial != update.partial.microbatches:
                raise Violation(
                    f"{self.worker_id} adopts layer {layer} with {version.partial} committed, not {update.partial}"
                )
