"""The kinds of schedules: in which order a stage runs its passes.

A pass is the forward or the backward work (or a part of the latter) of one microbatch in one chunk. What a
pass must receive and send is the compiler's business; here is only what distinguishes one kind from another.

Backward passes run in the order of the forward passes in every kind, so that a chunk's gradients are summed
in the order of the microbatches, whatever the kind and the number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from types import MappingProxyType
from typing import NamedTuple

from oobleck.plan import ScheduleKind

from .instruction import Op


class Pass(NamedTuple):
    """One computation: FORWARD, BACKWARD, BACKWARD_INPUT or BACKWARD_WEIGHT."""

    op: Op
    microbatch: int
    chunk: int


class PipelineShape(NamedTuple):
    """The numbers that a schedule is made from."""

    num_stages: int
    num_microbatches: int
    num_chunks: int


Order = Callable[[PipelineShape, int], Iterator[Pass]]


def _gpipe(shape: PipelineShape, stage: int) -> Iterator[Pass]:
    del stage
    return _alternate(shape, shape.num_microbatches)


def _one_f_one_b(shape: PipelineShape, stage: int) -> Iterator[Pass]:
    return _alternate(shape, shape.num_stages - 1 - stage)


def _interleaved(shape: PipelineShape, stage: int) -> Iterator[Pass]:
    """Order passes as Narayanan et al. (2021), section 2.2, do; any number of microbatches will do here.

    Rounds of `num_stages` microbatches go through all chunks: when the last of a round has passed stage 0,
    the first is back from the last stage. Gradients come back to a stage after a round trip through the
    stages after it, two passes for each.
    """
    if shape.num_chunks == 1:
        return _one_f_one_b(shape, stage)
    return _alternate(shape, 2 * (shape.num_stages - 1 - stage) + (shape.num_chunks - 1) * shape.num_stages)


def _zero_bubble(shape: PipelineShape, stage: int) -> Iterator[Pass]:
    """Order passes as ZB-H1 (Qi et al., 2023, section 2.3) does: 1F1B in which weight gradients lag behind.

    The gradient of the input is sent at once. The weights' lags by as many microbatches as there are
    stages before, and fills the end of the step. Every stage so holds up to `num_stages` activations, as
    the first one of 1F1B does. The first stage itself sends no gradient, and keeps its backward passes whole.
    """
    order = _one_f_one_b(shape, stage)
    return _split_backward(order, stage, shape.num_microbatches) if stage else order


def _split_backward(order: Iterator[Pass], lag: int, num_microbatches: int) -> Iterator[Pass]:
    done = 0
    for step in order:
        if step.op is Op.FORWARD:
            yield step
            continue
        yield step._replace(op=Op.BACKWARD_INPUT)
        if step.microbatch >= lag:
            yield Pass(Op.BACKWARD_WEIGHT, done, 0)
            done += 1
    for microbatch in range(done, num_microbatches):
        yield Pass(Op.BACKWARD_WEIGHT, microbatch, 0)


ORDERS: Mapping[ScheduleKind, Order] = MappingProxyType(
    {
        ScheduleKind.GPIPE: _gpipe,
        ScheduleKind.ONE_F_ONE_B: _one_f_one_b,
        ScheduleKind.INTERLEAVED: _interleaved,
        ScheduleKind.ZERO_BUBBLE: _zero_bubble,
    }
)


def _alternate(shape: PipelineShape, warm_up: int) -> Iterator[Pass]:
    """Yield `warm_up` forward passes, then one forward and one backward pass in turn, then what is left.

    The last round is filled up with microbatches that do not exist, and these are left out at the end: what
    is sound with them is sound without, as no other microbatch waits for them. A last round that is simply
    smaller can deadlock (5 microbatches over 4 stages with 3 chunks do).
    """
    forwards = _rounds(Op.FORWARD, shape, range(shape.num_chunks))
    backwards = _rounds(Op.BACKWARD, shape, range(shape.num_chunks - 1, -1, -1))
    for step in chain(islice(forwards, warm_up), _in_turn(forwards, backwards), backwards):
        if step.microbatch < shape.num_microbatches:
            yield step


def _in_turn(forwards: Iterator[Pass], backwards: Iterator[Pass]) -> Iterator[Pass]:
    for forward in forwards:
        yield forward
        yield next(backwards)


def _rounds(op: Op, shape: PipelineShape, chunks: range) -> Iterator[Pass]:
    """Yield the passes of one direction, the last round filled up: round by round, chunk by chunk."""
    for start in range(0, shape.num_microbatches, shape.num_stages):
        for chunk in chunks:
            for microbatch in range(start, start + shape.num_stages):
                yield Pass(op, microbatch, chunk)
