"""The time and the peak memory of a step, equal to the timeline's, for searches that compare many cuts.

The order in which a timeline evaluates instructions does not depend on their costs: programs are sequential, and the
messages of a link arrive in the order in which they were sent. So the order is found once for a schedule, and each step
with other costs is one pass over it. Loads and the end of the step are left out, as they cost nothing in comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from oobleck.plan import ScheduleKind

from .compile import compile_schedule
from .cost import StageCost
from .instruction import Op
from .schedule import Link, Schedule

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


@lru_cache(maxsize=32)
def step_flow(kind: ScheduleKind, *, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> StepFlow:
    """Return the flow of a compiled schedule; O(instructions), or a look-up for the latest ones."""
    schedule = compile_schedule(
        kind, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks, commits=False
    )
    return _Ordering(schedule).flow()


class _Ordering:
    """Runs every stage as far as it can, and wakes it for each message, as the timeline does."""

    def __init__(self, schedule: Schedule) -> None:
        stages = range(schedule.num_stages)
        self._schedule = schedule
        self._wires = [schedule.wires_of(stage) for stage in stages]
        links = {wire.link for wires in self._wires for wire in wires.values()}
        self._links = {link: index for index, link in enumerate(sorted(links))}
        self._position = [0] * schedule.num_stages
        self._sent: dict[Link, list[int]] = {link: [] for link in self._links}
        self._received = dict.fromkeys(self._links, 0)
        self._instructions: list[tuple[int, int, int]] = []
        self._num_messages = 0

    def flow(self) -> StepFlow:
        awake = list(range(self._schedule.num_stages))
        while awake:
            self._advance(awake.pop(), awake)
        return StepFlow(
            num_stages=self._schedule.num_stages,
            num_links=len(self._links),
            instructions=tuple(self._instructions),
            changes=tuple(
                tuple(
                    self._priced(stage, instruction.op, instruction.chunk)
                    for instruction in program
                    if instruction.op in _PASSES
                )
                for stage, program in enumerate(self._schedule.programs)
            ),
        )

    def _priced(self, stage: int, op: Op, chunk: int) -> int:
        return (chunk * self._schedule.num_stages + stage) * len(_PRICED) + _PRICED.index(op)

    def _advance(self, stage: int, awake: list[int]) -> None:
        program, wires = self._schedule.programs[stage], self._wires[stage]
        while self._position[stage] < len(program):
            op, chunk = program[self._position[stage]].op, program[self._position[stage]].chunk
            wire = wires.get((op, chunk))
            if wire is not None and wire.is_send:
                self._instructions.append((stage, self._links[wire.link], self._priced(stage, op, chunk)))
                self._sent[wire.link].append(self._num_messages)
                self._num_messages += 1
                awake.append(wire.link.target)
            elif wire is not None:
                sent, received = self._sent[wire.link], self._received[wire.link]
                if received == len(sent):
                    return
                self._instructions.append((stage, _RECEIVE, sent[received]))
                self._received[wire.link] += 1
            elif op in _PASSES:
                self._instructions.append((stage, _PASS, self._priced(stage, op, chunk)))
            self._position[stage] += 1
