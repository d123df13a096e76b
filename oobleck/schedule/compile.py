"""The compiler: from a kind, a number of stages and a number of microbatches to one program a stage.

The kind determines the order of the passes. The compiler adds the communication that each needs.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache

from oobleck.plan import ScheduleKind

from .instruction import STEP_TAIL, Instruction, Op, Program
from .orders import ORDERS, Order, PipelineShape
from .schedule import Schedule, ScheduleError, check_numbers

SECTIONED_KINDS = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)
"""The kinds whose backward passes are whole and in order, so that each section ends at one point of a program: after a
microbatch, or with several chunks a stage after a round of as many microbatches as there are stages."""


@lru_cache(maxsize=64)
def compile_schedule(
    kind: ScheduleKind,
    *,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    num_sections: int = 1,
    commits: bool = True,
) -> Schedule:
    """Compile one step of a pipeline.

    `num_microbatches` is the pipeline's own share; without any, the pipeline adds zeros to the reduction. With
    `commits=False` the programs end with the last backward pass: such programs finish another pipeline's share of an
    interrupted step. Gradients are committed at the end of each of `num_sections` sections of about equal size but the
    last, whose gradients the step's own reduction sums.

    Raises `ScheduleError` for numbers that have no schedule. O(stages · microbatches · chunks), or a look-up.
    """
    check_numbers(num_stages, num_microbatches, num_chunks)
    if kind is not ScheduleKind.INTERLEAVED and num_chunks != 1:
        raise ScheduleError(f"num_chunks is {num_chunks}; {kind.value} takes 1 (only interleaved takes more)")
    if num_stages == 1 and num_chunks > 1:
        raise ScheduleError(f"num_chunks is {num_chunks} with one stage, which would send to itself; use 1")
    if num_sections > 1 and kind not in SECTIONED_KINDS:
        raise ScheduleError(
            f"num_sections is {num_sections}; {kind.value} takes 1, because its gradients are never those of a section"
        )
    # With several chunks, all gradients so far are complete only between two rounds.
    round_size = num_stages if num_chunks > 1 else 1
    if not 1 <= num_sections <= max(1, math.ceil(num_microbatches / round_size)):
        each = f"{num_microbatches} microbatches" + (f" in rounds of {round_size}" if round_size > 1 else "")
        raise ScheduleError(f"num_sections is {num_sections} with {each}; each needs one")
    shape = PipelineShape(num_stages, num_microbatches, num_chunks)
    stops = section_stops(num_microbatches, num_sections, round_size=round_size)
    section_ends = frozenset(stop - 1 for stop in stops[:-1])
    tail = STEP_TAIL if commits else ()
    return Schedule(
        kind=kind,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        programs=tuple(
            _compile_program(ORDERS[kind], shape, stage, section_ends) + tail for stage in range(num_stages)
        ),
    )


def section_stops(num_microbatches: int, num_sections: int, *, round_size: int = 1) -> tuple[int, ...]:
    """Return the exclusive end of each section of a pipeline's share, after whole rounds."""
    rounds = math.ceil(num_microbatches / round_size)
    return tuple(
        min(num_microbatches, round_size * (rounds * (number + 1) // num_sections)) for number in range(num_sections)
    )


def _compile_program(order: Order, shape: PipelineShape, stage: int, section_ends: Collection[int]) -> Program:
    last = shape.num_stages - 1, shape.num_chunks - 1
    program: list[Instruction] = []
    for op, microbatch, chunk in order(shape, stage):
        # Backward passes of a microbatch end at the first chunk.
        ends_section = op is Op.BACKWARD and chunk == 0 and microbatch in section_ends
        program += _expand(op, microbatch, chunk, (stage, chunk) == (0, 0), (stage, chunk) == last, ends_section)
    return tuple(program)


# Stages share these tuples, which makes compiling cheap; they are small, and bounded in number.
@lru_cache(maxsize=65536)
def _expand(op: Op, microbatch: int, chunk: int, is_first: bool, is_last: bool, ends_section: bool) -> Program:
    """Surround a pass with its communication at a first, middle or last virtual stage."""
    # Receives come right before the pass and sends right after, so that a stage waits late and sends early.
    before: tuple[Op, ...] = ()
    after: tuple[Op, ...] = ()
    if op is Op.FORWARD:
        # Loading first lets it overlap with the wait for the stage before. One load serves all chunks.
        before = (Op.LOAD,) * (chunk == 0) + (Op.RECV_F,) * (not is_first)
        after = (Op.SEND_F,) * (not is_last)
    elif op is not Op.BACKWARD_WEIGHT:
        before = (Op.RECV_B,) * (not is_last)
        after = (Op.SEND_B,) * (not is_first) + (Op.COMMIT_SECTION,) * ends_section
    return tuple(Instruction(each, microbatch, chunk) for each in (*before, op, *after))
