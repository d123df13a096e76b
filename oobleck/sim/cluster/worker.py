"""Virtual workers: drivers of the follower and its `CommitState`, like `training.step.engine`, in virtual time.

`control.steps.Follower` decides what a worker does, and in which order. Here each effect becomes moves: the training
thread is a generator that yields wherever the real one may be preempted or has to wait, so the caller of `step` chooses
the interleaving. What must never happen, such as a layer that no worker sent, raises `Violation` on the spot.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import replace

from oobleck.control import protocol, steps
from oobleck.job import JobSpec
from oobleck.planner import WorkerId

from .agreements import VirtualAgreements
from .fabric import Violation, Wait
from .groups import GroupTable, NodeSums
from .layers import HeldLayers, Version
from .ports import Moves, WorkerPorts, pause
from .program import Programs
from .records import Records, VirtualShards
from .step import StepDriver
from .transfer import Transfers


class VirtualWorker:
    """One worker process. `step` makes the training thread's next move, `take` handles a message."""

    programs: type[Programs] = Programs

    def __init__(
        self, worker_id: WorkerId, job: JobSpec, ports: WorkerPorts, *, shards: VirtualShards | None = None
    ) -> None:
        """Take the job's `shards`; by default, endless ones."""
        self.worker_id = worker_id
        # All virtual workers share a thread, so there is nothing to lock.
        self.commit_state = steps.CommitState(worker_id, ports.announce, lock=nullcontext())
        self._ports = ports
        self._job = job
        self._records = Records(shards or VirtualShards.of(job), items=job.data.sequence_length - 1)
        self.store = HeldLayers(worker_id, num_microbatches=job.num_microbatches)
        self._groups = GroupTable(ports, self.commit_state)
        self._transfers = Transfers(ports, self.commit_state)
        self._consents = steps.ConsentBoard(lambda: self.commit_state.generation)
        self._board: steps.StepBoard | None = self._records if self._records.are_needed else None
        if job.needs_consent:
            self._board = self._consents
        self._follower = steps.Follower(job, self.commit_state, board=self._board, evaluates=True)
        agreements = steps.Agreements(worker_id, lock=nullcontext())
        self._agreements = VirtualAgreements(agreements, self.commit_state, ports)
        node_sums = self._node_sums = NodeSums(job, self.commit_state, self._groups, self.store)
        self._programs = self.programs(
            ports, self.commit_state, self._follower.partial_commit, self._carry_out, node_sums
        )
        self.driver = StepDriver(
            job,
            ports,
            self.commit_state,
            groups=self._groups,
            agreements=self._agreements,
            layers=self.store,
            records=self._records,
            programs=self._programs,
            node_sums=node_sums,
        )
        self._received: dict[int, Version] = {}
        self._ordered_s = 0.0  # the arrival of the newest order
        self._thread = self._carry_out(self._follower.run())
        self.wait = next(self._thread)

    def take(self, message: protocol.WorkerBound) -> None:
        """Handle one message, as the control thread does."""
        match message:
            case protocol.Fence(probe_addresses=probed):
                # The answer counts what the program has done by now.
                self._programs.note_microbatches()
                reaches, here = self._ports.fabric.reaches, self.worker_id.node
                unreachable = tuple(each.worker_id for each in probed if not reaches(here, each.worker_id.node))
                self._ports.say(replace(self.commit_state.answer(message), unreachable=unreachable))
            case protocol.AskActivity(inquiry=inquiry):
                self._programs.note_microbatches()
                activity = protocol.Activity(
                    device=self.worker_id.device,
                    inquiry=inquiry,
                    microbatches_done=self.commit_state.microbatches_done,
                    waits_for=(),  # waits here do not know their peers; the agent sees that a worker computes
                    has_come_on=False,
                )
                self._ports.say(activity)
            case protocol.PlanOrder():
                self._ordered_s = self._ports.clock()
                self._groups.know(message.common.addresses)
                if message.common.goes_back and self._ports.saver is not None:
                    self._ports.saver.go_back()
                if (needed := self.commit_state.give_order(message)) is not None:
                    self._ports.say(needed)
            case protocol.FinishStep():
                self.commit_state.want_stop()
            case protocol.SaveState(step=step) if self._ports.saver is not None:
                self._ports.saver.want(step)
            case protocol.UseShare():
                pass  # virtual machines have cores enough
            case protocol.ScanRequest(request=request, wants=wants):
                found = self._records.survey(wants)
                self._ports.say(protocol.ScanAnswer(device=self.worker_id.device, request=request, found=found))
            case protocol.StepRecords():
                self._records.tell(message)
                self._ports.announce()
            case protocol.StepsAllowed():
                self._consents.allow(message)
                self._ports.announce()
            case protocol.StepsOver():
                self._records.end(message)
                self._consents.end(message)
                self._ports.announce()
            case _:
                raise Violation(f"{self.worker_id} received {message}")

    def hear(self, source: WorkerId, message: protocol.CommitMessage) -> None:
        """Handle one message of another worker, at any point of the training thread, like `take`."""
        self._agreements.hear(source, message)
        self._ports.announce()

    @property
    def address(self) -> protocol.WorkerAddress:
        return self._groups.address

    def step(self) -> None:
        """Continue to the next point where the training thread may be preempted or has to wait."""
        self.wait = next(self._thread) if self.wait.ready() else self._thread.throw(steps.Interrupted())

    def fail(self) -> None:
        """End the wait with an error of the network."""
        self.wait = self._thread.throw(steps.PeerLost(self.wait.what))

    def _carry_out(self, effects: steps.WorkerEffects) -> Moves:
        """Carry out effects in order; failures go back to the follower."""
        outcome: steps.EffectOutcome = None
        failure: Exception | None = None
        while True:
            try:
                effect = effects.send(outcome) if failure is None else effects.throw(failure)
            except StopIteration:
                return
            outcome, failure = None, None
            try:
                outcome = yield from self._do(effect)
            except steps.FAILURES as error:
                failure = error

    def _do(self, effect: steps.WorkerEffect) -> Generator[Wait, None, steps.EffectOutcome]:
        match effect:
            case steps.Say(message=message):
                if isinstance(message, protocol.PeerFailed | protocol.RecordsFailed):
                    yield from pause("report")
                self._ports.say(message)
            case steps.ShareLossScale(committee=committee):
                if committee is not None and self._job.dtype == "float16":
                    yield from self._agreements.total(committee, effect.subject, protocol.Totals(()))
            case steps.Save() | steps.SaveEnd():
                if self._ports.saver is not None:
                    self._ports.saver.save(effect)
            case steps.PrepareToSave() | steps.CompareReplicas():
                pass  # virtual layers have no values
            case steps.ReportResumed(generation=generation):
                self._report_resumed(generation)
            case steps.ReportFinished():
                self._ports.say(protocol.Finished(device=self.worker_id.device, applied=self.commit_state.applied))
            case steps.AwaitPlanUpdate():
                return (yield from self._await_update())
            case steps.AwaitStep(step=step):
                board = self._board
                assert board is not None
                yield Wait(
                    f"whether step {step} follows",
                    lambda: board.is_told(step) or board.over_after(step - 1) is not None,
                    self.commit_state.is_fenced,
                )
            case steps.FormGroups(keys=keys, committee=committee):
                return (yield from self._groups.form(keys, beside=self._sum_groups(committee)))
            case steps.AwaitGroups():
                yield from self._groups.await_formed()
            case steps.KeepGroups(keys=keys, committee=committee):
                self._groups.keep([*keys, *self._sum_groups(committee)])
            case steps.EndTransfers(keys=keys):
                self._groups.leave(keys)
            case steps.Exchange(update=update):
                self._received = yield from self._transfers.exchange(update, self.store)
                yield from pause("about to adopt")
            case steps.Adopt():
                yield from self._adopt(effect)
            case steps.ReadCheckpoint():
                raise Violation(f"{self.worker_id} has nothing to restore from: virtual layers have no values")
            case _:
                return (yield from self.driver.do(effect))
        return None

    def _await_update(self) -> Generator[Wait, None, protocol.PlanUpdate]:
        self._groups.abandon_forming()
        yield Wait("an order", lambda: self.commit_state.has_update)
        update = self.commit_state.take_update()
        assert update is not None
        # The virtual master decides at once, and the workers wait for the time of its work.
        if (takes_s := self._ordered_s + self._ports.tempo.ordering_s(update) - self._ports.clock()) > 0:
            yield Wait("the master's work for the order", lambda: True, takes_s=takes_s)
        yield from pause("took an order")
        return update

    def _report_resumed(self, generation: int) -> None:
        self._ports.say(
            protocol.Resumed(
                device=self.worker_id.device,
                generation=generation,
                transfer_s=self._transfers.took_s,
                received_bytes=self._transfers.received_bytes,
                resumed_s=self._ports.clock(),
                busy_s=self._programs.busy_s,
            )
        )

    def _sum_groups(self, committee: steps.Committee | None) -> list[steps.GroupKey]:
        return [] if committee is None else self.driver.groups_of(committee)

    def _adopt(self, effect: steps.Adopt) -> Moves:
        yield from pause("adopting")
        update = effect.update
        keeping = {layer: self.store.state(layer) for layer in effect.keep}
        self.store.adopt(tuple(effect.layers), self._received, keeping, initial=update.initial)
        self._records.assignment_version = update.assignment_version
        self._received = {}
        self._node_sums.adopt(update.sharding)
        self.driver.adopt(update.plan, effect.seat, effect.committee)
        for layer, version in self.store.held.items():
            if version.partial != update.partial.microbatches:
                raise Violation(
                    f"{self.worker_id} adopts layer {layer} with {version.partial} committed, not {update.partial}"
                )
