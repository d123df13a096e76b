"""The order in which a stage runs its passes, for each kind of schedule.

A pass is the forward or the backward work (or a part of the latter) of one microbatch in one chunk.
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
    num_stages: int
    num_microbatches: int
    num_chunks: int


Order = Callable[[PipelineShape, int], Iterator[Pass]]


def _gpipe(shape: PipelineShape, stage: int) -> Iterator[Pass]:
    del stage
    return _alternate(shape, shape.num_microbatches)


def _one_f_one_b(shape: PipelineShape, stage: int) -> Iterator[Pass]:
    # One forward pass for each later stage keeps this one busy until the first microbatch has reached the last.
    return _alternate(shape, shape.num_stages - 1 - stage)


def _interleaved(shape: PipelineShape, stage: int) -> Iterator[Pass]:
    """Order passes as Narayanan et al. (2021), section 2.2, but for any number of microbatches."""
    if shape.num_chunks == 1:
        return _one_f_one_b(shape, stage)
    # Rounds of `num_stages` microbatches pass all chunks: when the last of a round has passed stage 0, the first
    # returns from the last stage. Gradients return to a stage after a round trip through the later stages, two passes
    # for each.
    return _alternate(shape, 2 * (shape.num_stages - 1 - stage) + (shape.num_chunks - 1) * shape.num_stages)


def _zero_bubble(shape: PipelineShape, stage: int) -> Iterator[Pass]:
    """Order passes as ZB-H1 (Qi et al., 2023, section 2.3): 1F1B in which weight gradients lag behind."""
    order = _one_f_one_b(shape, stage)
    # The gradient of the input is sent at once. The weights' gradients lag by one microbatch for each earlier stage and
    # fill the end of the step, so every stage holds up to `num_stages` activations, like the first one in 1F1B. The
    # first stage sends no gradient, and keeps its backward passes whole.
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


# In every kind, backward passes run in the order of the forward passes, so that a chunk's gradients are summed in the
# order of the microbatches, whatever the kind and the number of stages.
ORDERS: Mapping[ScheduleKind, Order] = MappingProxyType(
    {
        ScheduleKind.GPIPE: _gpipe,
        ScheduleKind.ONE_F_ONE_B: _one_f_one_b,
        ScheduleKind.INTERLEAVED: _interleaved,
        ScheduleKind.ZERO_BUBBLE: _zero_bubble,
    }
)


def _alternate(shape: PipelineShape, warm_up: int) -> Iterator[Pass]:
    """Yield `warm_up` forward passes, then one forward and one backward pass in turn, then the remaining ones."""
    # The last round is filled up with microbatches that do not exist, and these are dropped afterwards: no other
    # microbatch waits for them, so the order stays sound. A smaller last round can deadlock (5 microbatches over 4
    # stages with 3 chunks do).
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
    """Yield the passes of one direction, round by round and chunk by chunk, with a full last round."""
    for start in range(0, shape.num_microbatches, shape.num_stages):
        for chunk in chunks:
            for microbatch in range(start, start + shape.num_stages):
                yield Pass(op, microbatch, chunk)
