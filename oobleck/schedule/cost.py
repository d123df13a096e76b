"""What the work of one virtual stage costs, in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .instruction import Op
from .schedule import ScheduleError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One virtual stage: seconds and bytes for one microbatch, and what it adds to the end of the step."""

    forward_s: float
    backward_s: float
    backward_weight_s: float | None = None
    """Its part that BACKWARD_WEIGHT takes; None means half."""
    send_forward_s: float = 0.0
    """How long the link to the virtual stage after is busy with one microbatch, until it has arrived."""
    send_backward_s: float = 0.0
    """How long the link to the virtual stage before is busy with one microbatch, until it has arrived."""
    load_s: float = 0.0
    """What a LOAD keeps the stage from computing; counted at its first chunk only."""
    reduce_s: float = 0.0
    """What of the gradient reduction is left after the last backward pass."""
    commit_s: float = 0.0
    """The agreement at the end, once all have come to it; the slowest stage's counts."""
    optimizer_s: float = 0.0
    activation_bytes: int = 0
    """Kept of a microbatch from its forward pass to the end of its backward pass."""
    weight_activation_bytes: int | None = None
    """What BACKWARD_INPUT must leave for BACKWARD_WEIGHT: some of that, and gradients; None means as much as that."""
    static_bytes: int = 0
    """Held during the whole step: weights, gradients, optimizer state, copies, messages, and room for a pass."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value < float("inf"):
                raise ScheduleError(f"{field.name} is {value}; a cost is 0 or more, and finite")
        if self.backward_weight_s is not None and self.backward_weight_s > self.backward_s:
            raise ScheduleError(
                f"backward_weight_s is {self.backward_weight_s}; it is a part of backward_s ({self.backward_s})"
            )

    @property
    def _weight_s(self) -> float:
        return self.backward_s / 2 if self.backward_weight_s is None else self.backward_weight_s

    @property
    def _weight_bytes(self) -> int:
        return self.activation_bytes if self.weight_activation_bytes is None else self.weight_activation_bytes

    def seconds_of(self, op: Op) -> float:
        """How long the operation keeps the stage busy, or for a send the link; receives only wait."""
        match op:
            case Op.FORWARD:
                return self.forward_s
            case Op.BACKWARD:
                return self.backward_s
            case Op.BACKWARD_INPUT:
                return self.backward_s - self._weight_s
            case Op.BACKWARD_WEIGHT:
                return self._weight_s
            case Op.SEND_F:
                return self.send_forward_s
            case Op.SEND_B:
                return self.send_backward_s
            case Op.LOAD:
                return self.load_s
            case Op.REDUCE_GRAD:
                return self.reduce_s
            case Op.COMMIT:
                return self.commit_s
            case Op.OPTIMIZER_STEP:
                return self.optimizer_s
            case _:
                return 0.0

    def bytes_of(self, op: Op) -> int:
        """By how many bytes the operation changes what is kept of activations."""
        match op:
            case Op.FORWARD:
                return self.activation_bytes
            case Op.BACKWARD:
                return -self.activation_bytes
            case Op.BACKWARD_INPUT:
                return self._weight_bytes - self.activation_bytes
            case Op.BACKWARD_WEIGHT:
                return -self._weight_bytes
            case _:
                return 0
