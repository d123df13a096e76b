"""The text form of schedules: for people, for golden files, and for schedules written by hand.

    1f1b stages=2 microbatches=2 chunks=1
    0: load:0 forward:0 send_f:0 load:1 forward:1 send_f:1 recv_b:0 backward:0 …
    1: load:0 recv_f:0 forward:0 backward:0 send_b:0 …

An instruction is `operation:microbatch`, followed by `/chunk` for every chunk but the first; an instruction of the
whole step is the operation alone. Formatting and parsing are exact inverses.
"""

from __future__ import annotations

import re

from oobleck.plan import ScheduleKind

from .instruction import Instruction, Op, Program
from .schedule import Schedule, ScheduleError

_INSTRUCTION = re.compile(r"(?P<op>[a-z_]+)(:(?P<microbatch>0|[1-9][0-9]{0,8})(/(?P<chunk>[1-9][0-9]{0,8}))?)?")
_NUMBER = "(0|[1-9][0-9]{0,8})"
_HEADER = re.compile(rf"(\S+) stages={_NUMBER} microbatches={_NUMBER} chunks={_NUMBER}")
_OPS = {op.value: op for op in Op}
_KINDS = {kind.value: kind for kind in ScheduleKind}


def format_program(program: Program) -> str:
    """Write a program on one line."""
    return " ".join(map(str, program))


def parse_program(text: str, *, stage: int | None = None) -> Program:
    """Read a program; white space separates instructions. Raises `ScheduleError`, which names `stage`."""
    return tuple(_parse_instruction(word, index, stage) for index, word in enumerate(text.split()))


def format_schedule(schedule: Schedule) -> str:
    """Write a schedule: a line about the whole, then one for each stage."""
    header = (
        f"{schedule.kind.value} stages={schedule.num_stages} "
        f"microbatches={schedule.num_microbatches} chunks={schedule.num_chunks}"
    )
    lines = (f"{stage}: {format_program(program)}".rstrip() for stage, program in enumerate(schedule.programs))
    return "\n".join((header, *lines, ""))


def parse_schedule(text: str) -> Schedule:
    """Read a schedule. Raises `ScheduleError`; `check_schedule` then tells whether it is sound."""
    header, *lines = text.strip().splitlines() or [""]
    match = _HEADER.fullmatch(header.strip())
    if match is None or match[1] not in _KINDS:
        expected = f"{' or '.join(_KINDS)}, then stages=S microbatches=M chunks=C"
        raise ScheduleError(f"line 1 is {header[:80]!r}; it must be {expected}")
    return Schedule(
        kind=_KINDS[match[1]],
        num_stages=int(match[2]),
        num_microbatches=int(match[3]),
        num_chunks=int(match[4]),
        programs=tuple(_parse_line(line, stage) for stage, line in enumerate(lines)),
    )


def _parse_line(line: str, stage: int) -> Program:
    label, colon, program = line.partition(":")
    if label.strip() != str(stage) or not colon:
        raise ScheduleError(f"line {stage + 2} is {line[:80]!r}; it must start with '{stage}:'")
    return parse_program(program, stage=stage)


def _parse_instruction(word: str, index: int, stage: int | None) -> Instruction:
    match = _INSTRUCTION.fullmatch(word)
    op = _OPS.get(match["op"]) if match else None
    if match is None or op is None:
        raise ScheduleError(f"{word[:80]!r} is not an instruction, such as forward:3", stage=stage, index=index)
    if (match["microbatch"] is None) != op.is_tail:
        expectation = "takes no microbatch" if op.is_tail else "needs a microbatch"
        raise ScheduleError(f"{word!r}: {op.value} {expectation}", stage=stage, index=index)
    microbatch = None if op.is_tail else int(match["microbatch"])
    return Instruction(op, microbatch, int(match["chunk"] or 0))
