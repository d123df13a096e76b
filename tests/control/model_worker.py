"""The model's workers: the simulator's, with programs that are run instruction by instruction.

A fault may strike between any two of them, and messages between stages may be lost or arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oobleck.control.messages import WorkerMessage
from oobleck.control.standing import Interrupted, PeerLost
from oobleck.job import JobSpec
from oobleck.planner import Place, Profile
from oobleck.schedule import Instruction, Op, compile_schedule
from oobleck.sim.fabric import Fabric, Violation, Wait
from oobleck.sim.lane import Lane
from oobleck.sim.moves import Moves
from oobleck.sim.program import Programs, Work
from oobleck.sim.shards import VirtualShards
from oobleck.sim.tempo import Tempo
from oobleck.sim.worker import VirtualWorker

__all__ = ["SteppedWorker"]


class SteppedPrograms(Programs):
    """Programs without a clock, with messages between stages."""

    def execute(self, work: Work, lane: Lane, microbatches: Sequence[int], num_sections: int = 1) -> Moves:
        schedule = compile_schedule(
            lane.schedule,
            num_stages=len(lane.places),
            num_microbatches=len(microbatches),
            num_sections=num_sections,
            commits=False,
        )
        if self.standing.is_broken:
            raise PeerLost("a program of this step failed half-way before")
        self.on_begin()
        try:
            for instruction in schedule.programs[lane.stage]:
                assert instruction.microbatch is not None
                if instruction.op is Op.BANK:
                    yield from self.begin_bank(work)
                else:
                    yield from self._instruct(instruction, microbatches[instruction.microbatch], work, lane)
                    yield from self.bank.look()
        except PeerLost:
            self.spoiled.add(lane.key)
            self.standing.note_broken()
            raise
        except Interrupted:
            self.spoiled.add(lane.key)
            raise

    def _instruct(self, instruction: Instruction, microbatch: int, work: Work, lane: Lane) -> Moves:
        stopped = self.standing.is_pipeline_stopped
        match instruction.op:
            case Op.LOAD:
                yield Wait("load", lambda: not stopped(), stopped)
            case Op.RECV_F | Op.RECV_B:
                yield from self._receive(instruction.op, microbatch, work, lane)
            case Op.SEND_F | Op.SEND_B:
                forward = instruction.op is Op.SEND_F
                target = lane.places[lane.stage + (1 if forward else -1)]
                yield Wait("send", lambda: True, can_fail=lambda: self.fabric.lacks_a_member(lane.key))
                tag = 2 * microbatch + (not forward)
                self.fabric.send(lane.key, self.place, target, tag, (work.step, microbatch))
            case Op.BACKWARD_INPUT:
                yield Wait("backward_input", lambda: not stopped(), stopped)
            case Op.BACKWARD | Op.BACKWARD_WEIGHT:
                yield Wait("backward", lambda: not stopped(), stopped)
                if lane.key in self.spoiled:
                    raise Violation(f"{self.place} computes over {lane.key.name}, which was given up half-way before")
                self.standing.note_microbatch()
                work.microbatches.append(microbatch)

    def _receive(self, op: Op, microbatch: int, work: Work, lane: Lane) -> Moves:
        forward = op is Op.RECV_F
        source = lane.places[lane.stage + (-1 if forward else 1)]
        tag = 2 * microbatch + (not forward)
        yield Wait(
            f"{op.value} of microbatch {microbatch} of step {work.step}",
            lambda: self.fabric.has_mail(lane.key, source, self.place, tag),
            self.standing.is_pipeline_stopped,
            lambda: self.fabric.lacks_a_member(lane.key),
            touches_network=True,
        )
        received = self.fabric.receive(lane.key, source, self.place, tag)
        if received != (work.step, microbatch):
            raise Violation(f"{self.place} wants microbatch {microbatch} of step {work.step}, got {received}")


class SteppedWorker(VirtualWorker):
    """One worker process without a clock: whoever calls `step` decides how long everything takes."""

    programs = SteppedPrograms

    def __init__(
        self,
        place: Place,
        job: JobSpec,
        fabric: Fabric,
        say: Callable[[WorkerMessage], None],
        profile: Profile,
        shards: VirtualShards,
    ) -> None:
        super().__init__(place, job, fabric, say, tempo=Tempo(profile), clock=lambda: 0.0, shards=shards)
