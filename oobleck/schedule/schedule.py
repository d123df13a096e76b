"""Schedules as values: the programs of all stages of one pipeline, and the links between the stages.

A pipeline of `num_stages` stages with `num_chunks` chunks each is a chain of `num_stages * num_chunks`
virtual stages: chunk c of stage s is number `c * num_stages + s`. So the chunks of one stage are spread
over the model, and the chain runs through all stages once for each chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from oobleck.errors import UserError
from oobleck.plan import ScheduleKind

from .instruction import Instruction, Op, Program


class ScheduleError(UserError):
    """A schedule that cannot be made, read or run; names the place if there is one."""

    def __init__(
        self, reason: str, *, stage: int | None = None, index: int | None = None, instruction: Instruction | None = None
    ) -> None:
        numbers = (("stage", stage), ("instruction", index))
        place = ", ".join(f"{name} {number}" for name, number in numbers if number is not None)
        what = f" ({instruction})" if instruction is not None else ""
        super().__init__(f"{place}{what}: {reason}" if place else reason)
        self.reason = reason
        self.stage = stage
        self.index = index
        self.instruction = instruction


class Link(NamedTuple):
    """A first-in-first-out connection between two stages, for one direction of the computation."""

    source: int
    target: int
    is_forward: bool

    def __str__(self) -> str:
        return f"{'forward' if self.is_forward else 'backward'} link from stage {self.source} to stage {self.target}"


class Wire(NamedTuple):
    """The connection of one operation of one virtual stage."""

    link: Link
    is_send: bool
    """Whether the stage is the link's source."""
    source_chunk: int
    """The source's chunk, which identifies a message at both ends."""


def check_numbers(num_stages: int, num_microbatches: int, num_chunks: int) -> None:
    """Raise a `ScheduleError` for numbers that no schedule has."""
    for name, value, least in (
        ("num_stages", num_stages, 1),
        ("num_microbatches", num_microbatches, 0),
        ("num_chunks", num_chunks, 1),
    ):
        if value < least:
            raise ScheduleError(f"{name} is {value}; a schedule needs at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    kind: ScheduleKind
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    programs: tuple[Program, ...]

    def __post_init__(self) -> None:
        check_numbers(self.num_stages, self.num_microbatches, self.num_chunks)
        if len(self.programs) != self.num_stages:
            raise ScheduleError(f"{len(self.programs)} programs for {self.num_stages} stages; each needs one")

    @property
    def commits(self) -> bool:
        """Whether the programs end with reduction, commit and optimizer step."""
        return bool(self.programs[0]) and self.programs[0][-1].op is Op.OPTIMIZER_STEP

    def next_of(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """Return the (stage, chunk) after this one; None for the last virtual stage."""
        return self._position(chunk * self.num_stages + stage + 1)

    def previous_of(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """Return the (stage, chunk) before this one; None for the first virtual stage."""
        return self._position(chunk * self.num_stages + stage - 1)

    def wires_of(self, stage: int) -> dict[tuple[Op, int], Wire]:
        """Map every (operation, chunk) of the stage that sends or receives to its connection."""
        wires = {}
        for op in (Op.RECV_F, Op.SEND_F, Op.RECV_B, Op.SEND_B):
            is_send, is_forward = op in (Op.SEND_F, Op.SEND_B), op in (Op.RECV_F, Op.SEND_F)
            for chunk in range(self.num_chunks):
                peer = (self.next_of if is_send == is_forward else self.previous_of)(stage, chunk)
                if peer is not None:
                    source, target = ((stage, chunk), peer) if is_send else (peer, (stage, chunk))
                    wires[op, chunk] = Wire(Link(source[0], target[0], is_forward), is_send, source[1])
        return wires

    def _position(self, virtual_stage: int) -> tuple[int, int] | None:
        if not 0 <= virtual_stage < self.num_stages * self.num_chunks:
            return None
        return virtual_stage % self.num_stages, virtual_stage // self.num_stages


def in_order(schedule: Schedule) -> Iterator[tuple[int, Instruction, Wire | None]]:
    """Yield all (stage, instruction, wire) in an order in which each can run, with unbounded links.

    A commit waits for all stages. Raises `ScheduleError` on a schedule that deadlocks. O(instructions).
    """
    # Every stage runs as far as it can, and each message wakes its target. Whatever the instructions cost, each stage
    # runs its own in the same order, and the messages of a link arrive in the order in which they were sent.
    stages = range(schedule.num_stages)
    wires = [schedule.wires_of(stage) for stage in stages]
    under_way = {wire.link: 0 for own in wires for wire in own.values()}
    position, awake = [0 for _ in stages], list(stages)
    at_commit: set[int] = set()
    while awake:
        stage = awake.pop()
        for instruction in islice(schedule.programs[stage], position[stage], None):
            wire = wires[stage].get((instruction.op, instruction.chunk))
            if wire is not None and wire.is_send:
                under_way[wire.link] += 1
                awake.append(wire.link.target)
            elif wire is not None:
                if not under_way[wire.link]:
                    break
                under_way[wire.link] -= 1
            elif instruction.op is Op.COMMIT and len(at_commit) < schedule.num_stages:
                at_commit.add(stage)
                if len(at_commit) == schedule.num_stages:
                    awake += stages
                break
            yield stage, instruction, wire
            position[stage] += 1
    for stage, (at, program) in enumerate(zip(position, schedule.programs, strict=True)):
        if at < len(program):
            raise ScheduleError("deadlock", stage=stage, index=at, instruction=program[at])


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the most microbatches, times chunks, whose activations each stage holds at once. O(instructions)."""
    return tuple(_peak_of(program) for program in schedule.programs)


def _peak_of(program: Program) -> int:
    # Activations live from FORWARD to BACKWARD or BACKWARD_WEIGHT. Only the order within a program counts, no costs.
    held = peak = 0
    for instruction in program:
        if instruction.op is Op.FORWARD:
            held += 1
            peak = max(peak, held)
        elif instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            held -= 1
    return peak
