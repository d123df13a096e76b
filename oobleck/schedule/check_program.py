"""One program alone: is the work of one stage complete, in order, and within its memory?

What the whole schedule is checked for is `check`'s business.
"""

from __future__ import annotations

from .instruction import STEP_TAIL, Instruction, Op
from .schedule import Schedule, ScheduleError

__all__ = ["check_program"]


def check_program(schedule: Schedule, stage: int, max_in_flight: int | None) -> None:
    """Prove one stage's program complete and in order, or raise a `ScheduleError`. O(instructions)."""
    _ProgramCheck(schedule, stage, max_in_flight).run()


class _ProgramCheck:
    """One walk through one program: what was seen of each microbatch in each chunk."""

    def __init__(self, schedule: Schedule, stage: int, limit: int | None) -> None:
        self._schedule = schedule
        self._stage = stage
        self._limit = limit
        self._program = schedule.programs[stage]
        self._seen: dict[tuple[int, int], set[Op]] = {
            (microbatch, chunk): set()
            for microbatch in range(schedule.num_microbatches)
            for chunk in range(schedule.num_chunks)
        }
        self._needs = [_needs(schedule, stage, chunk) for chunk in range(schedule.num_chunks)]
        self._held = 0

    def run(self) -> None:
        body = self._check_tail()
        for index, instruction in enumerate(self._program[:body]):
            self._step(index, instruction)
        for (microbatch, chunk), seen in self._seen.items():
            for op in self._needs[chunk]:
                if op not in seen and not _is_replaced(op, seen):
                    missing = Instruction(op, microbatch, chunk)
                    raise self._error(len(self._program), None, f"{missing} is missing")

    def _check_tail(self) -> int:
        """Return where the microbatches' instructions end."""
        tail = STEP_TAIL if self._schedule.commits else ()
        body = max(0, len(self._program) - len(tail))
        for offset, expected in enumerate(tail):
            index = body + offset
            found = self._program[index] if index < len(self._program) else None
            if found != expected:
                raise self._error(index, found, f"a program that commits ends with {' '.join(map(str, tail))}")
        return body

    def _step(self, index: int, instruction: Instruction) -> None:
        op, chunk = instruction.op, instruction.chunk
        if instruction.microbatch is None:
            raise self._error(index, instruction, "belongs to the end of a program, and there once")
        seen = self._seen.get((instruction.microbatch, chunk))
        if seen is None:
            counts = f"{self._schedule.num_microbatches} microbatches and {self._schedule.num_chunks} chunks"
            raise self._error(index, instruction, f"is outside of the schedule's {counts}")
        needs = self._needs[chunk].get(op)
        if needs is None:
            raise self._error(index, instruction, "has no place here: the chain of virtual stages has none for it")
        if op in seen:
            raise self._error(index, instruction, "is there a second time")
        if _is_replaced(op, seen):
            raise self._error(index, instruction, "a backward pass is either whole or in two parts")
        for need in needs:
            # A microbatch is loaded once for all chunks, in the first.
            where = self._seen[instruction.microbatch, 0] if need is Op.LOAD else seen
            if need not in where and not _is_replaced(need, where):
                raise self._error(index, instruction, f"comes before its {need.value}")
        seen.add(op)
        self._count(index, instruction)

    def _count(self, index: int, instruction: Instruction) -> None:
        if instruction.op is Op.FORWARD:
            self._held += 1
            if self._limit is not None and self._held > self._limit:
                raise self._error(index, instruction, f"{self._held} activations in flight; the bound is {self._limit}")
        elif instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            self._held -= 1

    def _error(self, index: int, instruction: Instruction | None, reason: str) -> ScheduleError:
        return ScheduleError(reason, stage=self._stage, index=index, instruction=instruction)


def _needs(schedule: Schedule, stage: int, chunk: int) -> dict[Op, tuple[Op, ...]]:
    """For each operation that has a place at this virtual stage, those that come before it."""
    needs: dict[Op, tuple[Op, ...]] = {Op.LOAD: ()} if chunk == 0 else {}
    is_first = schedule.previous_of(stage, chunk) is None
    is_last = schedule.next_of(stage, chunk) is None
    if not is_first:
        needs |= {Op.RECV_F: (), Op.SEND_B: (Op.BACKWARD_INPUT,)}
    if not is_last:
        needs |= {Op.SEND_F: (Op.FORWARD,), Op.RECV_B: ()}
    before_backward = (Op.FORWARD,) if is_last else (Op.FORWARD, Op.RECV_B)
    return needs | {
        Op.FORWARD: (Op.LOAD,) if is_first else (Op.LOAD, Op.RECV_F),
        Op.BACKWARD: before_backward,
        Op.BACKWARD_INPUT: before_backward,
        Op.BACKWARD_WEIGHT: (Op.BACKWARD_INPUT,),
    }


def _is_replaced(op: Op, seen: set[Op]) -> bool:
    """Whether the other way to run the backward pass stands in for this operation."""
    if op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
        return Op.BACKWARD in seen
    return op is Op.BACKWARD and (Op.BACKWARD_INPUT in seen or Op.BACKWARD_WEIGHT in seen)
