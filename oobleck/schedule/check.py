"""The checker: proof that a schedule can be run, whatever the timing.

It trusts nothing about how a schedule was made. In order:

1. each program alone: every microbatch passes every chunk once forward and once backward, with the load,
   the sends and the receives that its place in the chain needs, each after what it depends on; activations
   in flight stay within the stage's bound; the step's tail is complete, at the end, and on all stages;
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
from .schedule import Link, Schedule, ScheduleError

__all__ = ["check_schedule"]


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
    ends = [_ends_of(schedule, stage) for stage in range(schedule.num_stages)]
    _check_order(ends)
    _check_progress(ends, buffers)


class _End(NamedTuple):
    """A send or receive, as its link sees it."""

    at: int
    """Index in its program."""
    instruction: Instruction
    link: Link
    is_send: bool
    source_chunk: int
    """The chunk as the link's source counts it: the two ends of one message agree on it."""


def _ends_of(schedule: Schedule, stage: int) -> list[_End]:
    """List the sends and receives of a stage in their order."""
    wiring = {
        (op, chunk): _wire(schedule, stage, op, chunk)
        for op in (Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B)
        for chunk in range(schedule.num_chunks)
    }
    ends = []
    for index, instruction in enumerate(schedule.programs[stage]):
        wire = wiring.get((instruction.op, instruction.chunk))
        if wire is not None:
            ends.append(_End(index, instruction, *wire))
    return ends


def _wire(schedule: Schedule, stage: int, op: Op, chunk: int) -> tuple[Link, bool, int] | None:
    """(link, whether this is its source, chunk as the source counts it); None where the chain ends."""
    peer = (schedule.next_of if op in (Op.SEND_F, Op.RECV_B) else schedule.previous_of)(stage, chunk)
    if peer is None:
        return None
    is_send = op in (Op.SEND_F, Op.SEND_B)
    source, target = (stage, peer[0]) if is_send else (peer[0], stage)
    return Link(source, target, op in (Op.SEND_F, Op.RECV_F)), is_send, chunk if is_send else peer[1]


def _check_order(ends: Sequence[Sequence[_End]]) -> None:
    sent: dict[Link, list[_End]] = {}
    received: dict[Link, list[_End]] = {}
    for of_stage in ends:
        for end in of_stage:
            (sent if end.is_send else received).setdefault(end.link, []).append(end)
    for link in sorted(sent):
        # Programs are complete by now, so the two ends of a link can differ in their order only.
        for source, target in zip(sent[link], received[link], strict=True):
            expected = source.instruction.microbatch, source.source_chunk
            if expected != (target.instruction.microbatch, target.source_chunk):
                reason = f"the next message of the {link} is {source.instruction}"
                raise ScheduleError(reason, stage=link.target, index=target.at, instruction=target.instruction)


def _check_progress(ends: Sequence[Sequence[_End]], buffers: int) -> None:
    """Run all sends and receives against bounded links, each stage as far as it gets, until none moves."""
    under_way = {end.link: 0 for of_stage in ends for end in of_stage}
    position = [0] * len(ends)
    awake = list(range(len(ends)))
    while awake:
        stage = awake.pop()
        while position[stage] < len(ends[stage]):
            end = ends[stage][position[stage]]
            if under_way[end.link] == (buffers if end.is_send else 0):
                break
            under_way[end.link] += 1 if end.is_send else -1
            awake.append(end.link.target if end.is_send else end.link.source)
            position[stage] += 1
    stuck = {stage: ends[stage][at] for stage, at in enumerate(position) if at < len(ends[stage])}
    for stage, end in stuck.items():
        peer = end.link.source if end.link.target == stage else end.link.target
        where = f"stuck at instruction {stuck[peer].at} ({stuck[peer].instruction})"
        reason = f"deadlock: waits for stage {peer}, which is {where}"
        raise ScheduleError(reason, stage=stage, index=end.at, instruction=end.instruction)
