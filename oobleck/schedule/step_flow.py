"""The time and the peak memory of a step, equal to the timeline's, for searches that compare many cuts.

The order of a schedule's instructions is found once, and each step with other costs is one pass over it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from oobleck.plan import ScheduleKind

from .compile import compile_schedule
from .cost import StageCost
from .instruction import Op
from .schedule import Link, in_order

_PASSES = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_SENDS = (Op.SEND_F, Op.SEND_B)
_PRICED = (*_PASSES, *_SENDS)
_RECEIVE = -1  # stands for the link of an instruction that receives
_PASS = -2  # stands for the link of an instruction that computes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlow:
    """A schedule's instructions in an order in which each of them can run, whatever they cost."""

    num_stages: int
    num_links: int
    instructions: tuple[tuple[int, int, int], ...]
    """(stage, link, number): the number of the cost for passes and sends, that of the message for receives. Messages
    are numbered as they are sent."""
    changes: tuple[tuple[int, ...], ...]
    """For each stage, the numbers of its passes' costs, in order."""

    def step_s(self, costs: Sequence[StageCost]) -> float:
        """Return the end of the last pass, in the seconds of a timeline; O(instructions)."""
        # Comparisons instead of `max`: a search runs this loop thousands of times.
        seconds = [cost.seconds_of(op) for cost in costs for op in _PRICED]
        now_s, free_s = [0.0] * self.num_stages, [0.0] * self.num_links
        arrivals_s: list[float] = []
        for stage, link, number in self.instructions:
            if link == _PASS:
                now_s[stage] += seconds[number]
            elif link == _RECEIVE:
                arrived_s = arrivals_s[number]
                if arrived_s > now_s[stage]:
                    now_s[stage] = arrived_s
            else:
                start_s = free_s[link]
                if now_s[stage] > start_s:
                    start_s = now_s[stage]
                free_s[link] = start_s + seconds[number]
                arrivals_s.append(free_s[link])
        return max(now_s)

    def peak_memory_bytes(self, costs: Sequence[StageCost]) -> tuple[int, ...]:
        """Return the most bytes that each stage holds; O(passes)."""
        changes = [cost.bytes_of(op) for cost in costs for op in _PRICED]
        peaks = []
        for stage, own in enumerate(self.changes):
            held = peak = sum(cost.static_bytes for cost in costs[stage :: self.num_stages])
            for priced in own:
                held += changes[priced]
                if held > peak:
                    peak = held
            peaks.append(peak)
        return tuple(peaks)


# The order (`in_order`) does not depend on the instructions' costs, so cuts that are compared share a flow.
@lru_cache(maxsize=32)
def step_flow(kind: ScheduleKind, *, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> StepFlow:
    """Return the flow of a compiled schedule; O(instructions), or a look-up for the latest ones."""
    schedule = compile_schedule(
        kind, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks, commits=False
    )

    def priced(stage: int, op: Op, chunk: int) -> int:
        return (chunk * num_stages + stage) * len(_PRICED) + _PRICED.index(op)

    wires = [schedule.wires_of(stage) for stage in range(num_stages)]
    links = {link: index for index, link in enumerate(sorted({wire.link for own in wires for wire in own.values()}))}
    unreceived: dict[Link, deque[int]] = {link: deque() for link in links}
    instructions: list[tuple[int, int, int]] = []
    num_messages = 0
    for stage, instruction, wire in in_order(schedule):
        op, chunk = instruction.op, instruction.chunk
        if wire is not None and wire.is_send:
            instructions.append((stage, links[wire.link], priced(stage, op, chunk)))
            unreceived[wire.link].append(num_messages)
            num_messages += 1
        elif wire is not None:
            instructions.append((stage, _RECEIVE, unreceived[wire.link].popleft()))
        # Loads and the end of the step are left out, as they cost nothing in comparisons.
        elif op in _PASSES:
            instructions.append((stage, _PASS, priced(stage, op, chunk)))
    changes = tuple(
        tuple(priced(stage, each.op, each.chunk) for each in program if each.op in _PASSES)
        for stage, program in enumerate(schedule.programs)
    )
    return StepFlow(num_stages=num_stages, num_links=len(links), instructions=tuple(instructions), changes=changes)
