"""The timeline: when each instruction of a schedule runs, given the costs of each stage.

The evaluation is exact, event by event, bubbles included. A stage runs its program in order. A send costs the
stage nothing: the message waits for the link, occupies it, and has then arrived. Messages of one link follow each
other, those of different links overlap. A receive waits for the arrival. A commit begins when all stages have reached
it. Links here hold any number of messages, since senders do not wait for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from .cost import StageCost
from .instruction import Instruction, Op, Program
from .schedule import Link, Schedule, ScheduleError, Wire, peak_in_flight


class Span(NamedTuple):
    """An interval in which a stage is busy with one instruction."""

    start_s: float
    end_s: float
    instruction: Instruction


class Transfer(NamedTuple):
    """An interval in which a link is busy with the message of one send."""

    start_s: float
    end_s: float
    link: Link
    instruction: Instruction


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The times of one step, in seconds from its start."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    """The spans of each stage, in order; instructions that take no time have none."""
    transfers: tuple[Transfer, ...]
    """The transfers of each link, in order; messages that take no time have none."""
    ends_s: tuple[float, ...]
    """The end of each stage's last instruction."""
    costs: tuple[StageCost, ...]
    """The costs of each virtual stage."""

    @property
    def makespan_s(self) -> float:
        """The time of one step: the end of the last stage."""
        return max(self.ends_s)

    @cached_property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """The memory that each stage's devices need together, for static memory and activations."""
        return tuple(
            _peak_memory(program, self.costs[stage :: self.schedule.num_stages])
            for stage, program in enumerate(self.schedule.programs)
        )

    @cached_property
    def compute_end_s(self) -> float:
        """The end of the last microbatch's last pass, before the tail."""
        return max((s.end_s for spans in self.spans for s in spans if not s.instruction.op.is_tail), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """How long each stage computes, the tail not counted."""
        return tuple(
            math.fsum(span.end_s - span.start_s for span in spans if not span.instruction.op.is_tail)
            for spans in self.spans
        )

    @property
    def bubble_share(self) -> float:
        """Share of all stages' time up to `compute_end_s` in which they wait; 0 when there is no work."""
        available_s = self.compute_end_s * self.schedule.num_stages
        return 1.0 - math.fsum(self.busy_s) / available_s if available_s else 0.0

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each stage, the most microbatches times chunks whose activations it holds at once."""
        return peak_in_flight(self.schedule)


def timeline(schedule: Schedule, costs: Sequence[StageCost]) -> Timeline:
    """Evaluate a schedule.

    `costs` has one entry for each virtual stage, in the order of the chain: chunk c of stage s is entry
    `c * num_stages + s`. Raises `ScheduleError` on a schedule that deadlocks. O(instructions).
    """
    expected = schedule.num_stages * schedule.num_chunks
    if len(costs) != expected:
        raise ScheduleError(f"{len(costs)} costs for {expected} virtual stages; each needs one")
    run = _Run(schedule, costs)
    run.run()
    return Timeline(
        schedule=schedule,
        spans=tuple(map(tuple, run.spans)),
        transfers=tuple(transfer for link in sorted(run.links) for transfer in run.links[link].transfers),
        ends_s=tuple(run.now_s),
        costs=tuple(costs),
    )


def _peak_memory(program: Program, costs: Sequence[StageCost]) -> int:
    """Return the most bytes a stage holds; `costs` are those of its chunks."""
    changes = {(op, chunk): cost.bytes_of(op) for chunk, cost in enumerate(costs) for op in Op}
    held = peak = sum(cost.static_bytes for cost in costs)
    for instruction in program:
        held += changes[instruction.op, instruction.chunk]
        peak = max(peak, held)
    return peak


class _LinkState:
    """A link's messages."""

    __slots__ = ("arrivals_s", "free_s", "is_awaited", "transfers")

    def __init__(self) -> None:
        self.free_s = 0.0
        self.is_awaited = False
        """Whether the target waits for the next message."""
        self.arrivals_s: deque[float] = deque()
        """Arrivals of messages that were not received yet."""
        self.transfers: list[Transfer] = []


class _Run:
    """One evaluation: every stage runs as far as it can, and wakes when the message or commit it waits for arrives."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost]) -> None:
        stages = range(schedule.num_stages)
        self._schedule = schedule
        self._wires = [schedule.wires_of(stage) for stage in stages]
        self._seconds = [_seconds_of(costs[stage :: schedule.num_stages]) for stage in stages]
        self._commit_s = max(cost.commit_s for cost in costs)
        self._position = [0] * schedule.num_stages
        self._awake = list(stages)
        self._at_commit: list[int] = []
        self.now_s = [0.0] * schedule.num_stages
        self.spans: list[list[Span]] = [[] for _ in stages]
        self.links = {wire.link: _LinkState() for wires in self._wires for wire in wires.values()}

    def run(self) -> None:
        while self._awake:
            self._advance(self._awake.pop())
        for stage, (at, program) in enumerate(zip(self._position, self._schedule.programs, strict=True)):
            if at < len(program):
                raise ScheduleError("deadlock", stage=stage, index=at, instruction=program[at])

    def _advance(self, stage: int) -> None:
        """Run one stage until it ends or must wait for another."""
        wires, seconds = self._wires[stage], self._seconds[stage]
        for instruction in islice(self._schedule.programs[stage], self._position[stage], None):
            key = instruction.op, instruction.chunk
            wire = wires.get(key)
            if wire is not None:
                if not self._communicate(stage, wire, instruction, seconds[key]):
                    return
            elif instruction.op is Op.COMMIT:
                self._commit(stage)
                return
            elif seconds[key]:
                self._occupy(stage, instruction, seconds[key])
            self._position[stage] += 1

    def _occupy(self, stage: int, instruction: Instruction, duration_s: float) -> None:
        start_s = self.now_s[stage]
        self.now_s[stage] = start_s + duration_s
        self.spans[stage].append(Span(start_s, start_s + duration_s, instruction))

    def _communicate(self, stage: int, wire: Wire, instruction: Instruction, duration_s: float) -> bool:
        """Send or receive; returns False if the message has not been sent."""
        link = self.links[wire.link]
        if wire.is_send:
            start_s = max(self.now_s[stage], link.free_s)
            link.free_s = start_s + duration_s
            link.arrivals_s.append(link.free_s)
            if duration_s:
                link.transfers.append(Transfer(start_s, link.free_s, wire.link, instruction))
            if link.is_awaited:
                link.is_awaited = False
                self._awake.append(wire.link.target)
            return True
        if not link.arrivals_s:
            link.is_awaited = True
            return False
        self.now_s[stage] = max(self.now_s[stage], link.arrivals_s.popleft())
        return True

    def _commit(self, stage: int) -> None:
        """Wait for the other stages; the last one to arrive lets all continue."""
        self._at_commit.append(stage)
        if len(self._at_commit) < self._schedule.num_stages:
            return
        start_s = max(self.now_s)
        for each in self._at_commit:
            self.now_s[each] = start_s
            if self._commit_s:
                self._occupy(each, self._schedule.programs[each][self._position[each]], self._commit_s)
            self._position[each] += 1
        self._awake.extend(self._at_commit)


def _seconds_of(costs: Sequence[StageCost]) -> dict[tuple[Op, int], float]:
    """Map (operation, chunk) to seconds; operations of the whole step take the sum over the chunks."""
    seconds = {(op, chunk): cost.seconds_of(op) for chunk, cost in enumerate(costs) for op in Op}
    for op in (Op.REDUCE_GRAD, Op.OPTIMIZER_STEP):
        seconds[op, 0] = math.fsum(cost.seconds_of(op) for cost in costs)
    return seconds
