"""Instructions, the smallest units of a worker's work, and programs, which are lists of them.

LOAD             fetch the microbatch's samples; once a microbatch, on every stage
RECV_F           block until the hidden states of the previous virtual stage have arrived
FORWARD          compute the chunk's layers, and keep their activations
SEND_F           hand the result to the link to the next virtual stage; do not wait for its arrival
RECV_B           block until the gradient of that result has arrived
BACKWARD         compute the gradients of input and weights, and drop the activations
BACKWARD_INPUT   compute the gradient of the input alone, and keep what the weights still need
BACKWARD_WEIGHT  compute the gradients of the weights, and drop the activations
SEND_B           hand the gradient of the input to the link to the previous virtual stage; do not wait
COMMIT_SECTION   begin to sum the gradients so far over each parameter's owner set, while the program continues;
                 they are those of all microbatches up to this one, and no other
REDUCE_GRAD      sum the gradients over each parameter's owner set
COMMIT           agree with every worker of every pipeline that the step is complete
OPTIMIZER_STEP   apply the optimizer
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """An operation. The values are the words of the text form."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_F = "send_f"
    RECV_F = "recv_f"
    SEND_B = "send_b"
    RECV_B = "recv_b"
    COMMIT_SECTION = "commit_section"
    REDUCE_GRAD = "reduce_grad"
    COMMIT = "commit"
    OPTIMIZER_STEP = "optimizer_step"

    # Enum's own hash is a Python function, and a checker looks up hundreds of thousands of operations.
    __hash__ = str.__hash__

    @property
    def is_tail(self) -> bool:
        """Whether the operation belongs to the whole step instead of one microbatch."""
        return self in _TAIL_OPS


_TAIL_OPS = (Op.REDUCE_GRAD, Op.COMMIT, Op.OPTIMIZER_STEP)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on one microbatch in one of the stage's chunks."""

    op: Op
    microbatch: int | None = None
    """Position within the pipeline's share, from 0; None for an operation of the whole step."""
    chunk: int = 0
    """The stage's own chunk, of sends and receives as well."""

    def __post_init__(self) -> None:
        assert (self.microbatch is None) == self.op.is_tail, f"{self.op} with microbatch {self.microbatch}"
        assert self.microbatch is None or self.microbatch >= 0, f"{self.op} with microbatch {self.microbatch}"
        assert self.chunk >= 0, f"{self.op} with chunk {self.chunk}"

    def __str__(self) -> str:
        if self.microbatch is None:
            return self.op.value
        chunk = f"/{self.chunk}" if self.chunk else ""
        return f"{self.op.value}:{self.microbatch}{chunk}"


Program = tuple[Instruction, ...]
"""The work of one stage in one step, in order."""

STEP_TAIL: Program = tuple(Instruction(op) for op in _TAIL_OPS)
"""The end of every program that commits its step."""
