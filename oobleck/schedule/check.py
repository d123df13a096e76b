"""The checker: proof that a schedule can run, whatever the timing.

It assumes nothing about how a schedule was made, and checks in this order:

1. each program alone: every microbatch passes every chunk once forward and once backward, with the load,
   sends and receives that its place in the chain needs, each after its dependencies; activations in flight stay
   within the stage's bound; the step's tail is complete and at the end, on all stages; all stages commit the same
   sections, and each section holds whole microbatches;
2. each link: the target receives the source's messages, in the same order;
3. all together: no deadlock with bounded links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .instruction import STEP_TAIL, Instruction, Op, Program
from .schedule import Link, Schedule, ScheduleError, Wire


def check_schedule(schedule: Schedule, *, max_in_flight: Sequence[int] | None = None, buffers: int = 1) -> None:
    """Prove the schedule sound, or raise a `ScheduleError` that names stage, index and instruction.

    `max_in_flight` bounds, for each stage, the microbatches times chunks whose activations are held at once.
    `buffers` is the number of sent messages that a link holds: a send waits while the link is full. Links keep their
    order. O(instructions).
    """
    assert buffers >= 1, "a link without a buffer is a rendezvous, which sends do not wait for"
    assert max_in_flight is None or len(max_in_flight) == schedule.num_stages
    for stage in range(schedule.num_stages):
        _check_program(schedule, stage, None if max_in_flight is None else max_in_flight[stage])
    _check_section_commits(schedule)
    ends = [_ends_of(schedule, stage) for stage in range(schedule.num_stages)]
    _check_order(ends)
    _check_progress(ends, buffers)


def _check_section_commits(schedule: Schedule) -> None:
    section_ends = [[each for each in program if each.op is Op.COMMIT_SECTION] for program in schedule.programs]
    wanted = {commit.microbatch: commit for of_stage in section_ends for commit in of_stage}
    for stage, of_stage in enumerate(section_ends):
        found, end = [commit.microbatch for commit in of_stage], len(schedule.programs[stage])
        for microbatch, commit in sorted(wanted.items(), key=lambda item: item[0] or 0):
            if microbatch not in found:
                raise _error(stage, end, None, f"{commit} is missing, which other stages have")
            if found.count(microbatch) > 1:
                raise _error(stage, end, None, f"{commit} appears twice")


class _End(NamedTuple):
    at: int
    """Index in its program."""
    instruction: Instruction
    wire: Wire

    @property
    def message(self) -> tuple[int | None, int]:
        """The identity of the message, equal at its two ends."""
        return self.instruction.microbatch, self.wire.source_chunk


def _ends_of(schedule: Schedule, stage: int) -> list[_End]:
    wires = schedule.wires_of(stage)
    return [
        _End(at, instruction, wires[key])
        for at, instruction in enumerate(schedule.programs[stage])
        if (key := (instruction.op, instruction.chunk)) in wires
    ]


def _check_order(ends: Sequence[Sequence[_End]]) -> None:
    sent: dict[Link, list[_End]] = {}
    received: dict[Link, list[_End]] = {}
    for of_stage in ends:
        for end in of_stage:
            (sent if end.wire.is_send else received).setdefault(end.wire.link, []).append(end)
    for link in sorted(sent):
        # Programs are complete by now, so the two ends of a link can differ in their order only.
        for source, target in zip(sent[link], received[link], strict=True):
            if source.message != target.message:
                reason = f"the next message of the {link} is {source.instruction}"
                raise _error(link.target, target.at, target.instruction, reason)


def _check_progress(ends: Sequence[Sequence[_End]], buffers: int) -> None:
    """Run all sends and receives against bounded links, each stage as far as it gets, until none moves."""
    # One run is enough. Programs are sequential and each link has one writer and one reader, so an instruction that can
    # run stays able to run whatever others do first (a Kahn process network; with a bound, a marked graph): if one
    # interleaving ends, all do, and if one deadlocks, all do at the same place.
    under_way = {end.wire.link: 0 for of_stage in ends for end in of_stage}
    position = [0] * len(ends)
    awake = list(range(len(ends)))
    while awake:
        stage = awake.pop()
        while position[stage] < len(ends[stage]):
            link, is_send, _ = ends[stage][position[stage]].wire
            if under_way[link] == (buffers if is_send else 0):
                break
            under_way[link] += 1 if is_send else -1
            awake.append(link.target if is_send else link.source)
            position[stage] += 1
    stuck = {stage: ends[stage][at] for stage, at in enumerate(position) if at < len(ends[stage])}
    for stage, end in stuck.items():
        peer = end.wire.link.target if end.wire.is_send else end.wire.link.source
        where = f"stuck at instruction {stuck[peer].at} ({stuck[peer].instruction})"
        reason = f"deadlock: waits for stage {peer}, which is {where}"
        raise _error(stage, end.at, end.instruction, reason)


# --- one program alone -----------------------------------------------------------------------------------------------

# A large schedule has hundreds of thousands of instructions, so the operations seen of a microbatch are a set of bits,
# and a rule is three such sets.

_BITS = {op: 1 << number for number, op in enumerate(Op)}
_LOAD, _FORWARD = _BITS[Op.LOAD], _BITS[Op.FORWARD]
_INPUT, _WEIGHT = _BITS[Op.BACKWARD_INPUT], _BITS[Op.BACKWARD_WEIGHT]
_BOTH_PARTS = _INPUT | _WEIGHT
_WHOLE = _BITS[Op.BACKWARD] | _BOTH_PARTS


class _Rule(NamedTuple):
    """The rule of an operation at one virtual stage, as sets of bits."""

    sets: int
    """Operations that are done after it: a whole backward pass also counts as both its parts."""
    needs: int
    """Operations that must be done before it."""
    excludes: int
    """Operations that must not be done before it."""
    activations: int = 0
    """The change of the number of activations in flight."""


def _check_program(schedule: Schedule, stage: int, max_in_flight: int | None) -> None:
    """Prove one stage's program complete and in order, or raise a `ScheduleError`. O(instructions)."""
    program = schedule.programs[stage]
    stop = _check_tail(schedule, stage)
    rules = [_rules_of(schedule, stage, chunk) for chunk in range(schedule.num_chunks)]
    seen = [[0] * schedule.num_microbatches for _ in range(schedule.num_chunks)]
    held = 0
    for index, instruction in enumerate(program[:stop]):
        microbatch, chunk = instruction.microbatch, instruction.chunk
        if microbatch is None:
            raise _error(stage, index, instruction, "may appear only once, at the end of a program")
        if microbatch >= schedule.num_microbatches or chunk >= schedule.num_chunks:
            counts = f"{schedule.num_microbatches} microbatches and {schedule.num_chunks} chunks"
            raise _error(stage, index, instruction, f"is outside of the schedule's {counts}")
        if instruction.op is Op.COMMIT_SECTION:
            _check_section_commit(stage, index, instruction, seen)
            continue
        rule = rules[chunk].get(instruction.op)
        if rule is None:
            raise _error(stage, index, instruction, "has no place here: the chain of virtual stages has none for it")
        done = seen[chunk][microbatch]
        if instruction.op is not Op.LOAD:  # noted at the first chunk, and good for all
            done |= seen[0][microbatch] & _LOAD
        if done & rule.needs != rule.needs or done & rule.excludes:
            raise _error(stage, index, instruction, _explain(instruction.op, rule, done))
        seen[chunk][microbatch] |= rule.sets
        held += rule.activations
        if max_in_flight is not None and held > max_in_flight:
            reason = f"{held} activations in flight; the bound is {max_in_flight}"
            raise _error(stage, index, instruction, reason)
    _check_completeness(stage, program, rules, seen)


def _check_section_commit(stage: int, index: int, instruction: Instruction, seen: list[list[int]]) -> None:
    """Prove that a section holds the whole microbatches up to its own, and no others."""
    assert instruction.microbatch is not None
    # The last section has no commit of its own: the step's reduction sums it.
    if instruction.microbatch >= len(seen[0]) - 1:
        raise _error(stage, index, instruction, "commits nothing that the end of the step does not reduce")
    for done_of in seen:
        for microbatch, done in enumerate(done_of):
            if microbatch <= instruction.microbatch and done & _BOTH_PARTS != _BOTH_PARTS:
                raise _error(stage, index, instruction, f"comes before the backward pass of microbatch {microbatch}")
            if microbatch > instruction.microbatch and done & _BOTH_PARTS:
                raise _error(stage, index, instruction, f"comes after a backward pass of microbatch {microbatch}")


def _check_tail(schedule: Schedule, stage: int) -> int:
    """Return the index at which the microbatches' instructions end."""
    program = schedule.programs[stage]
    tail = STEP_TAIL if schedule.commits else ()
    stop = max(0, len(program) - len(tail))
    for index, expected in enumerate(tail, start=stop):
        found = program[index] if index < len(program) else None
        if found != expected:
            raise _error(stage, index, found, f"a program that commits ends with {' '.join(map(str, tail))}")
    return stop


def _rules_of(schedule: Schedule, stage: int, chunk: int) -> dict[Op, _Rule]:
    is_first = schedule.previous_of(stage, chunk) is None
    is_last = schedule.next_of(stage, chunk) is None
    before_forward = _LOAD if is_first else _LOAD | _BITS[Op.RECV_F]
    before_backward = _FORWARD if is_last else _FORWARD | _BITS[Op.RECV_B]
    rules = {
        Op.FORWARD: _Rule(_FORWARD, before_forward, _FORWARD, activations=1),
        Op.BACKWARD: _Rule(_WHOLE, before_backward, _WHOLE, activations=-1),
        Op.BACKWARD_INPUT: _Rule(_INPUT, before_backward, _INPUT),
        Op.BACKWARD_WEIGHT: _Rule(_WEIGHT, _INPUT, _WEIGHT, activations=-1),
    }
    # A microbatch is loaded once for all chunks of its stage, with the first chunk.
    place = {Op.LOAD: 0} if chunk == 0 else {}
    place |= {} if is_first else {Op.RECV_F: 0, Op.SEND_B: _INPUT}
    place |= {} if is_last else {Op.SEND_F: _FORWARD, Op.RECV_B: 0}
    return rules | {op: _Rule(_BITS[op], needs, _BITS[op]) for op, needs in place.items()}


def _explain(op: Op, rule: _Rule, done: int) -> str:
    if done & _BITS[op] and not (op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) and done & _BITS[Op.BACKWARD]):
        return "appears a second time"
    if done & rule.excludes:
        return "a backward pass is either whole or in two parts"
    missing = next(need for need, bit in _BITS.items() if bit & rule.needs & ~done)
    return f"comes before its {missing.value}"


def _check_completeness(stage: int, program: Program, rules: list[dict[Op, _Rule]], seen: list[list[int]]) -> None:
    for chunk, done_of in enumerate(seen):
        # A whole backward pass sets both parts as well.
        needed = [op for op in rules[chunk] if op is not Op.BACKWARD]
        complete = sum(_BITS[op] for op in needed)
        for microbatch, done in enumerate(done_of):
            if done & complete != complete:
                op = next(op for op in needed if not done & _BITS[op])
                missing = Instruction(Op.BACKWARD if op is Op.BACKWARD_INPUT else op, microbatch, chunk)
                raise _error(stage, len(program), None, f"{missing} is missing")


def _error(stage: int, index: int, instruction: Instruction | None, reason: str) -> ScheduleError:
    return ScheduleError(reason, stage=stage, index=index, instruction=instruction)
