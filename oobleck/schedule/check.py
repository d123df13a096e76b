"""The checker: proof that a schedule can be run, whatever the timing.

It trusts nothing about how a schedule was made. In order:

1. each program alone: every microbatch passes every chunk once forward and once backward, with the load,
   the sends and the receives that its place in the chain needs, each after what it depends on; activations
   in flight stay within the stage's bound; the step's tail is complete, at the end, and on all stages; so is
   what they commit, and each holds whole microbatches;
2. each link: the target receives what the source sends, in the same order;
3. all together: no deadlock with bounded links.

The third needs one run only. Programs are sequential and each link has one writer and one reader, so an
instruction that can run stays able to run whatever others do first (a Kahn process network; with a bound, a
marked graph): if one interleaving ends, all do, and if one deadlocks, all do at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .check_program import check_program
from .instruction import Instruction, Op
from .schedule import Link, Schedule, ScheduleError, Wire


def check_schedule(schedule: Schedule, *, max_in_flight: Sequence[int] | None = None, buffers: int = 1) -> None:
    """Prove the schedule sound, or raise a `ScheduleError` that names stage, index and instruction.

    `max_in_flight` bounds, for each stage, the microbatches times chunks whose activations are held at once.
    `buffers` is how many messages a link holds that were sent and not yet received: a send waits only when
    so many are under way. Links keep their order. O(instructions).
    """
    assert buffers >= 1, "a link without a buffer is a rendezvous, which sends do not wait for"
    assert max_in_flight is None or len(max_in_flight) == schedule.num_stages
    for stage in range(schedule.num_stages):
        check_program(schedule, stage, None if max_in_flight is None else max_in_flight[stage])
    _check_section_commits(schedule)
    ends = [_ends_of(schedule, stage) for stage in range(schedule.num_stages)]
    _check_order(ends)
    _check_progress(ends, buffers)


def _check_section_commits(schedule: Schedule) -> None:
    section_ends = [[each for each in program if each.op is Op.COMMIT_SECTION] for program in schedule.programs]
    wanted = {section_commit.microbatch: section_commit for of_stage in section_ends for section_commit in of_stage}
    for stage, of_stage in enumerate(section_ends):
        program, found = schedule.programs[stage], [section_commit.microbatch for section_commit in of_stage]
        for microbatch, section_commit in sorted(wanted.items(), key=lambda item: item[0] or 0):
            if microbatch not in found:
                raise ScheduleError(
                    f"{section_commit} is missing, which other stages have", stage=stage, index=len(program)
                )
            if found.count(microbatch) > 1:
                raise ScheduleError(f"{section_commit} is twice", stage=stage, index=len(program))


class _End(NamedTuple):
    """A send or receive, and its connection."""

    at: int
    """Index in its program."""
    instruction: Instruction
    wire: Wire

    @property
    def message(self) -> tuple[int | None, int]:
        """What the two ends of one message agree on."""
        return self.instruction.microbatch, self.wire.source_chunk


def _ends_of(schedule: Schedule, stage: int) -> list[_End]:
    """List the sends and receives of a stage in their order."""
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
                raise ScheduleError(reason, stage=link.target, index=target.at, instruction=target.instruction)


def _check_progress(ends: Sequence[Sequence[_End]], buffers: int) -> None:
    """Run all sends and receives against bounded links, each stage as far as it gets, until none moves."""
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
        raise ScheduleError(reason, stage=stage, index=end.at, instruction=end.instruction)
