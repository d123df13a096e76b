"""The learning rate of each step: a pure function, so that no worker keeps a scheduler's state."""

from __future__ import annotations

import math
from typing import assert_never

from oobleck.job import OptimizerSpec

__all__ = ["learning_rate"]


def learning_rate(spec: OptimizerSpec, *, step: int, max_steps: int) -> float:
    """Return the learning rate that step `step` (1 … max_steps) is applied with.

    It rises linearly over the first `warmup_steps` steps, reaching its peak at the last of them, then stays
    (constant), falls to 0 after the last step (linear), or follows half a cosine to the same end (cosine).
    """
    assert step >= 1, f"step {step}; steps count from 1"
    if step <= spec.warmup_steps:
        return spec.learning_rate * step / spec.warmup_steps
    # The first step after the warm-up still takes the peak; the step after the last one would take 0.
    progress = min(1.0, (step - 1 - spec.warmup_steps) / max(1, max_steps - spec.warmup_steps))
    match spec.lr_scheduler_type:
        case "constant":
            return spec.learning_rate
        case "linear":
            return spec.learning_rate * (1.0 - progress)
        case "cosine":
            return spec.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            assert_never(spec.lr_scheduler_type)
