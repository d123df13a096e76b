"""Schedules as values: the programs of all stages of one pipeline, and who is connected with whom.

A pipeline of `num_stages` stages with `num_chunks` chunks each is a chain of `num_stages * num_chunks`
virtual stages: chunk c of stage s is number `c * num_stages + s`. So the chunks of one stage are spread
over the model, and the chain runs through all stages once for each chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from oobleck.errors import UserError
from oobleck.plan import ScheduleKind

from .instruction import Instruction, Op, Program


class ScheduleError(UserError):
    """A schedule that cannot be made, read or run; names the place if there is one."""

    def __init__(
        self, reason: str, *, stage: int | None = None, index: int | None = None, instruction: Instruction | None = None
    ) -> None:
        place = ", ".join(
            part
            for part in (
                f"stage {stage}" if stage is not None else "",
                f"instruction {index}" if index is not None else "",
            )
            if part
        )
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
    """How one operation of one virtual stage is connected."""

    link: Link
    is_send: bool
    """Whether the stage is the link's source."""
    source_chunk: int
    """The chunk as the source counts it: the two ends of one message agree on it."""


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
    """One program for each stage of a pipeline."""

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
        """(stage, chunk) that takes the hidden states of this one; None after the last virtual stage."""
        return self._position(chunk * self.num_stages + stage + 1)

    def previous_of(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """(stage, chunk) that gives this one its hidden states; None before the first virtual stage."""
        return self._position(chunk * self.num_stages + stage - 1)

    def wires_of(self, stage: int) -> dict[tuple[Op, int], Wire]:
        """Map every (operation, chunk) of the stage that sends or receives to its connection."""
        wires = {}
        for op in (Op.RECV_F, Op.SEND_F, Op.RECV_B, Op.SEND_B):
            for chunk in range(self.num_chunks):
                is_downstream = op in (Op.SEND_F, Op.RECV_B)
                peer = (self.next_of if is_downstream else self.previous_of)(stage, chunk)
                if peer is not None:
                    wires[op, chunk] = _wire(op, (stage, chunk), peer)
        return wires

    def _position(self, virtual_stage: int) -> tuple[int, int] | None:
        if not 0 <= virtual_stage < self.num_stages * self.num_chunks:
            return None
        return virtual_stage % self.num_stages, virtual_stage // self.num_stages


def _wire(op: Op, own: tuple[int, int], peer: tuple[int, int]) -> Wire:
    is_send = op in (Op.SEND_F, Op.SEND_B)
    source, target = (own, peer) if is_send else (peer, own)
    return Wire(Link(source[0], target[0], op in (Op.SEND_F, Op.RECV_F)), is_send, source[1])


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Count the most microbatches, times chunks, whose activations each stage holds at once.

    Activations live from FORWARD to BACKWARD or BACKWARD_WEIGHT; the order within a program decides this
    alone, whatever things cost. O(instructions).
    """
    return tuple(_peak_of(program) for program in schedule.programs)


def _peak_of(program: Program) -> int:
    held = peak = 0
    for instruction in program:
        if instruction.op is Op.FORWARD:
            held += 1
            peak = max(peak, held)
        elif instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            held -= 1
    return peak
