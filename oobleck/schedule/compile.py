"""The compiler: from a kind, a number of stages and a number of microbatches to one program a stage.

A program is a sequence of *passes*: a forward pass brings its load, receive and send along, a backward pass
its receive and send. Receives stand right before what needs them and sends right after what makes them, so
that a stage waits as late and gives as early as it can. The kinds differ only in the order of passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain

from .instruction import STEP_TAIL, Instruction, Op, Program
from .schedule import Schedule, ScheduleError, ScheduleKind

__all__ = ["compile_schedule"]


@lru_cache(maxsize=64)
def compile_schedule(
    kind: ScheduleKind, *, num_stages: int, num_microbatches: int, num_chunks: int = 1, commits: bool = True
) -> Schedule:
    """Compile one step of a pipeline.

    `num_microbatches` is the pipeline's own share; none at all is allowed, and leaves a step in which the
    pipeline adds zeros to the reduction. With `commits=False` the programs end with the last backward pass:
    an extra program that finishes another pipeline's share of an interrupted step.

    Raises `ScheduleError` where the numbers make no schedule. O(stages · microbatches · chunks); results
    are kept, and calling again with the same numbers costs a look-up.
    """
    if kind is not ScheduleKind.INTERLEAVED and num_chunks != 1:
        raise ScheduleError(f"num_chunks is {num_chunks}; {kind.value} takes 1 (only interleaved takes more)")
    tail = STEP_TAIL if commits else ()
    return Schedule(
        kind=kind,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        programs=tuple(
            (*chain.from_iterable(_passes(kind, stage, num_stages, num_microbatches)), *tail)
            for stage in range(num_stages)
        ),
    )


def _passes(kind: ScheduleKind, stage: int, num_stages: int, num_microbatches: int) -> Iterator[Program]:
    is_first, is_last = stage == 0, stage == num_stages - 1
    forwards = (_forward(microbatch, is_first, is_last) for microbatch in range(num_microbatches))
    backwards = (_backward(microbatch, is_first, is_last) for microbatch in range(num_microbatches))
    # Backward passes run in the order of the forward passes in every kind, so that gradients are summed in
    # the same order whatever the kind and the cut.
    warm_up = num_microbatches if kind is ScheduleKind.GPIPE else min(num_microbatches, num_stages - 1 - stage)
    return _alternate(forwards, backwards, warm_up)


def _alternate(forwards: Iterator[Program], backwards: Iterator[Program], warm_up: int) -> Iterator[Program]:
    """Yield `warm_up` forward passes, then one forward and one backward pass in turn, then what is left."""
    for _ in range(warm_up):
        yield next(forwards)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


@lru_cache(maxsize=65536)
def _forward(microbatch: int, is_first: bool, is_last: bool, chunk: int = 0) -> Program:
    """Return a forward pass; stages share these tuples, which is what makes compiling cheap."""
    ops: Iterable[tuple[Op, bool]] = (
        (Op.LOAD, chunk == 0),
        (Op.RECV_F, not is_first),
        (Op.FORWARD, True),
        (Op.SEND_F, not is_last),
    )
    return tuple(Instruction(op, microbatch, chunk) for op, is_needed in ops if is_needed)


@lru_cache(maxsize=65536)
def _backward(microbatch: int, is_first: bool, is_last: bool, chunk: int = 0) -> Program:
    ops: Iterable[tuple[Op, bool]] = (
        (Op.RECV_B, not is_last),
        (Op.BACKWARD, True),
        (Op.SEND_B, not is_first),
    )
    return tuple(Instruction(op, microbatch, chunk) for op, is_needed in ops if is_needed)
