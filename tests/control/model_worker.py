"""The model's workers: the simulator's, and so the real follower, with programs run instruction by instruction.

A fault may strike between any two of them, and messages between stages may be lost or arrive.
"""

from __future__ import annotations

from collections.abc import Callable

from oobleck.control.protocol import CommitMessage, RecordRun, WorkerBound, WorkerMessage
from oobleck.control.steps.commit_state import Interrupted, PeerLost
from oobleck.control.steps.groups import PlaceInPlan
from oobleck.control.steps.worker_effects import Compute
from oobleck.job import JobSpec
from oobleck.planner import Profile, WorkerId
from oobleck.schedule import Instruction, Op, Wire, compile_schedule
from oobleck.sim.cluster.fabric import Fabric, Violation, Wait, label
from oobleck.sim.cluster.layers import Version
from oobleck.sim.cluster.ports import Carry, Moves, WorkerPorts
from oobleck.sim.cluster.program import Programs, Work
from oobleck.sim.cluster.records import VirtualShards
from oobleck.sim.cluster.tempo import Tempo
from oobleck.sim.cluster.worker import VirtualWorker

from .model_saver import Saver

__all__ = ["SteppedWorker"]


class SteppedPrograms(Programs):
    """Programs without a clock, with messages between stages."""

    def execute(self, work: Work, seat: PlaceInPlan, program: Compute) -> Moves:
        schedule = compile_schedule(
            seat.schedule,
            num_stages=seat.num_stages,
            num_chunks=len(seat.chunks),
            num_microbatches=len(program.microbatches),
            num_sections=program.num_sections,
            commits=False,
        )
        self._wires = schedule.wires_of(seat.stage)
        try:
            yield from self.node_sums.begin(seat.stage_key, work.step)
            before = len(work.microbatches)
            for instruction in schedule.programs[seat.stage]:
                assert instruction.microbatch is not None
                if instruction.op is Op.COMMIT_SECTION:
                    yield from self.node_sums.conclude(seat.stage_key, work.step, work.microbatches[before:])
                    if program.ends_under_plan:
                        yield from self.carry_out(self.partial_commit.begin(work.step))
                    before = len(work.microbatches)
                else:
                    yield from self._instruct(instruction, program.microbatches[instruction.microbatch], work, seat)
                    yield from self.carry_out(self.partial_commit.look())
            yield from self.node_sums.conclude(seat.stage_key, work.step, work.microbatches[before:])
        except (Interrupted, PeerLost):
            self.spoiled.add(seat.lane_key)
            raise

    def _instruct(self, instruction: Instruction, microbatch: int, work: Work, seat: PlaceInPlan) -> Moves:
        stopped = self.commit_state.is_pipeline_stopped
        match instruction.op:
            case Op.LOAD:
                yield Wait("load", lambda: not stopped(), stopped)
            case Op.RECV_F | Op.RECV_B:
                yield from self._receive(instruction, microbatch, work, seat)
            case Op.SEND_F | Op.SEND_B:
                wire = self._wires[instruction.op, instruction.chunk]
                target = self._neighbour(seat, wire.link.target)
                yield Wait("send", lambda: True, can_fail=lambda: self.fabric.lacks_a_member(seat.lane_key))
                tag = self._tag(wire, microbatch, seat)
                self.fabric.send(seat.lane_key, self.worker_id, target, tag, (work.step, microbatch))
            case Op.FORWARD:
                yield from self.node_sums.forward(seat.stage_key, work.step)
            case Op.BACKWARD_INPUT:
                yield Wait("backward_input", lambda: not stopped(), stopped)
            case Op.BACKWARD | Op.BACKWARD_WEIGHT:
                yield Wait("backward", lambda: not stopped(), stopped)
                yield from self.node_sums.backward(seat.stage_key, work.step, microbatch)
                if seat.lane_key in self.spoiled:
                    group = label(seat.lane_key)
                    raise Violation(f"{self.worker_id} computes over {group}, which was given up half-way before")
                if instruction.chunk == 0:
                    self.commit_state.note_microbatch()
                    work.microbatches.append(microbatch)

    def _neighbour(self, seat: PlaceInPlan, stage: int) -> WorkerId:
        """The device of a stage that has this one's rank in its own."""
        rank = seat.pipeline.stages[seat.stage].worker_ids.index(self.worker_id)
        return seat.pipeline.stages[stage].worker_ids[rank]

    def _tag(self, wire: Wire, microbatch: int, seat: PlaceInPlan) -> int:
        return 2 * (microbatch * len(seat.chunks) + wire.source_chunk) + (not wire.link.is_forward)

    def _receive(self, instruction: Instruction, microbatch: int, work: Work, seat: PlaceInPlan) -> Moves:
        wire = self._wires[instruction.op, instruction.chunk]
        source = self._neighbour(seat, wire.link.source)
        tag = self._tag(wire, microbatch, seat)
        yield Wait(
            f"{instruction} of microbatch {microbatch} of step {work.step}",
            lambda: self.fabric.has_mail(seat.lane_key, source, self.worker_id, tag),
            self.commit_state.is_pipeline_stopped,
            lambda: self.fabric.lacks_a_member(seat.lane_key),
            touches_network=True,
        )
        received = self.fabric.receive(seat.lane_key, source, self.worker_id, tag)
        if received != (work.step, microbatch):
            raise Violation(f"{self.worker_id} wants microbatch {microbatch} of step {work.step}, got {received}")


class SteppedWorker(VirtualWorker):
    """One worker process without a clock: whoever calls `step` decides how long everything takes."""

    programs = SteppedPrograms

    def __init__(
        self,
        worker_id: WorkerId,
        job: JobSpec,
        fabric: Fabric,
        say: Callable[[WorkerMessage], None],
        carry: Carry,
        profile: Profile,
        shards: VirtualShards,
        *,
        run: str | None = None,
    ) -> None:
        """`run` is the digest of one whose states are saved."""
        saver = None if run is None else Saver(worker_id, run=run, num_layers=len(profile.layers), say=say)
        tempo = Tempo(profile)
        ports = WorkerPorts(fabric=fabric, carry=carry, tempo=tempo, clock=lambda: 0.0, say=say, saver=saver)
        self.is_stuck = False
        """The process is stopped: neither of its threads does anything, and its connections do not show it."""
        super().__init__(worker_id, job, ports, shards=shards)

    def take(self, message: WorkerBound) -> None:
        if not self.is_stuck:
            super().take(message)

    def hear(self, source: WorkerId, message: CommitMessage) -> None:
        if not self.is_stuck:
            super().hear(source, message)

    @property
    def layers(self) -> dict[int, Version]:
        """The layers that it holds under the plan in force."""
        return self.store.held

    @property
    def kept(self) -> dict[int, Version]:
        """Layers of the plan before, until all have adopted the new one."""
        return self.store.kept

    @property
    def holds_reduced(self) -> bool:
        """Whether it can still apply the step that its peers may have applied."""
        return bool(self.driver.reduced)

    @property
    def taken(self) -> dict[int, tuple[RecordRun, ...]]:
        """The records of the steps that it has applied."""
        return self.driver.taken

    @property
    def is_settled(self) -> bool:
        """Whether its layers are already those that it answers."""
        return self.wait.what not in ("adopting", "applying")

    @property
    def can_step(self) -> bool:
        return not self.is_stuck and (self.wait.ready() or self.wait.interrupted())
