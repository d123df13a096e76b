"""The loss scale of float16: a state machine with the same inputs on every rank, which the commit distributes.

Gradients are those of the loss times the scale, and are divided by it before they are applied. If any of them overflow,
the commit's sum of their norms over all ranks is not finite, so all ranks skip the step and halve the scale. Such a
step is committed like any other and its samples are used up; only the parameters do not change. The rule and its
numbers are those of torch.amp.GradScaler (Micikevicius et al., "Mixed Precision Training", ICLR 2018, 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_GROWTH_INTERVAL = 2000
_LARGEST = 2.0**24
_SMALLEST = 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scale for the next step, a power of two, and its history."""

    scale: float = 2.0**16
    good_steps: int = 0
    """Steps without an overflow since the last change of the scale."""
    num_skipped: int = 0
    """Steps skipped so far, which the optimizer does not count."""

    def after(self, *, is_skipped: bool) -> LossScale:
        """Return the state after a step that was skipped or applied."""
        if is_skipped:
            return LossScale(scale=max(self.scale / 2, _SMALLEST), num_skipped=self.num_skipped + 1)
        if self.good_steps + 1 < _GROWTH_INTERVAL:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(self.scale * 2, _LARGEST), good_steps=0)

    def as_numbers(self) -> tuple[float, ...]:
        """Return the state as whole numbers and a power of two."""
        return (self.scale, float(self.good_steps), float(self.num_skipped))

    @classmethod
    def from_numbers(cls, scale: float, good_steps: float, num_skipped: float) -> LossScale:
        return cls(scale=scale, good_steps=round(good_steps), num_skipped=round(num_skipped))
