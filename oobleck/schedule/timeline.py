"""The timeline: when each instruction of a schedule runs, given the costs of each stage.

The evaluation is exact, event by event, bubbles included. A stage runs its program in order. A send costs the
stage nothing: the message waits for the link, occupies it, and has then arrived. Messages of one link follow each
other, those of different links overlap. A receive waits for the arrival.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .cost import StageCost
from .instruction import Instruction, Op, Program
from .schedule import Link, Schedule, ScheduleError, in_order, peak_in_flight


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
    size = schedule.num_stages
    seconds = [_seconds_of(costs[stage::size]) for stage in range(size)]
    commit_s = max(cost.commit_s for cost in costs)
    committed_s: float | None = None
    now_s = [0.0] * size
    spans: list[list[Span]] = [[] for _ in range(size)]
    transfers: dict[Link, list[Transfer]] = {}
    free_s: dict[Link, float] = {}
    arrivals_s: dict[Link, deque[float]] = {}
    for stage, instruction, wire in in_order(schedule):
        start_s, duration_s = now_s[stage], seconds[stage][instruction.op, instruction.chunk]
        if wire is not None and wire.is_send:
            link = wire.link
            # Links hold any number of messages here, since senders do not wait for them.
            start_s = max(start_s, free_s.get(link, 0.0))
            free_s[link] = start_s + duration_s
            arrivals_s.setdefault(link, deque()).append(free_s[link])
            if duration_s:
                transfers.setdefault(link, []).append(Transfer(start_s, free_s[link], link, instruction))
            continue  # the stage itself takes no time
        if wire is not None:
            now_s[stage] = max(start_s, arrivals_s[wire.link].popleft())
            continue
        # A commit begins when all stages have reached it, which they have: `in_order` waits for that.
        if instruction.op is Op.COMMIT:
            committed_s = max(now_s) if committed_s is None else committed_s
            start_s, duration_s = max(start_s, committed_s), commit_s
        now_s[stage] = start_s + duration_s
        if duration_s:
            spans[stage].append(Span(start_s, now_s[stage], instruction))
    return Timeline(
        schedule=schedule,
        spans=tuple(map(tuple, spans)),
        transfers=tuple(transfer for link in sorted(transfers) for transfer in transfers[link]),
        ends_s=tuple(now_s),
        costs=tuple(costs),
    )


def _peak_memory(program: Program, costs: Sequence[StageCost]) -> int:
    changes = {(op, chunk): cost.bytes_of(op) for chunk, cost in enumerate(costs) for op in Op}
    held = peak = sum(cost.static_bytes for cost in costs)
    for instruction in program:
        held += changes[instruction.op, instruction.chunk]
        peak = max(peak, held)
    return peak


def _seconds_of(costs: Sequence[StageCost]) -> dict[tuple[Op, int], float]:
    """Map (operation, chunk) to seconds; operations of the whole step take the sum over the chunks."""
    seconds = {(op, chunk): cost.seconds_of(op) for chunk, cost in enumerate(costs) for op in Op}
    for op in (Op.REDUCE_GRAD, Op.OPTIMIZER_STEP):
        seconds[op, 0] = math.fsum(cost.seconds_of(op) for cost in costs)
    return seconds
