"""The costs of one virtual stage, in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .instruction import Op
from .schedule import ScheduleError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    forward_s: float
    backward_s: float
    backward_weight_s: float | None = None
    """The part of `backward_s` for BACKWARD_WEIGHT; None means half."""
    send_forward_s: float = 0.0
    """The time from the send of a microbatch to its arrival at the next virtual stage."""
    send_backward_s: float = 0.0
    """The time from the send of a microbatch to its arrival at the previous virtual stage."""
    load_s: float = 0.0
    """The time for which a LOAD blocks computation; counted at a stage's first chunk only."""
    reduce_s: float = 0.0
    """The rest of the gradient reduction after the last backward pass."""
    commit_s: float = 0.0
    """The agreement at the end, once all stages have reached it; the slowest stage's counts."""
    optimizer_s: float = 0.0
    activation_bytes: int = 0
    """Memory that a microbatch holds from its forward pass to the end of its backward pass."""
    weight_activation_bytes: int | None = None
    """Memory that is held from BACKWARD_INPUT to BACKWARD_WEIGHT: some activations, and gradients. None means
    `activation_bytes`."""
    static_bytes: int = 0
    """Memory held for the whole step: weights, gradients, optimizer state, copies, messages, and room for a pass."""

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
        """Return how long the operation keeps the stage busy, or for a send the link; receives only wait."""
        seconds = {
            Op.FORWARD: self.forward_s,
            Op.BACKWARD: self.backward_s,
            Op.BACKWARD_INPUT: self.backward_s - self._weight_s,
            Op.BACKWARD_WEIGHT: self._weight_s,
            Op.SEND_F: self.send_forward_s,
            Op.SEND_B: self.send_backward_s,
            Op.LOAD: self.load_s,
            Op.REDUCE_GRAD: self.reduce_s,
            Op.COMMIT: self.commit_s,
            Op.OPTIMIZER_STEP: self.optimizer_s,
        }
        return seconds.get(op, 0.0)

    def bytes_of(self, op: Op) -> int:
        """Return the change in bytes of the memory that activations hold."""
        changes = {
            Op.FORWARD: self.activation_bytes,
            Op.BACKWARD: -self.activation_bytes,
            Op.BACKWARD_INPUT: self._weight_bytes - self.activation_bytes,
            Op.BACKWARD_WEIGHT: -self._weight_bytes,
        }
        return changes.get(op, 0)
