"""How much may differ where the same is computed in another order.

The script adds up a whole batch; a run adds up its microbatches, on several workers. So sums differ by rounding, which
is relative to what is added up, and grows with the steps through the optimizer: Adam divides a gradient by its own
size, so the error of a small gradient becomes as large as that of any other. Each bound is at least twenty times what
scripts that are trained alike were seen to differ by, and far below what a mistake makes: a loss that is divided by
another number of tokens differs by more than 1e-3, and a parameter that another one should follow, or that is frozen in
one of the two, by all of its movement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Bounds, all of them relative."""

    loss: float
    grad_norm: float
    learning_rate: float = 1e-9
    """It is computed in double precision in both."""
    movement: float
    """Of the norm of a parameter's difference, to the norm of its movement since the start."""
    rounding: float
    """Of the norm of a difference, to the norm of all values: half a digit of each."""
    noise: float
    """Of a parameter's gradients to those of all parameters: below that they are rounding errors."""


_TOLERANCES: Mapping[str, Tolerance] = {
    "float64": Tolerance(loss=1e-6, grad_norm=1e-5, movement=1e-3, rounding=1e-12, noise=1e-12),
    "float32": Tolerance(loss=5e-5, grad_norm=1e-3, movement=2e-2, rounding=1e-6, noise=1e-6),
    "float16": Tolerance(loss=5e-3, grad_norm=5e-2, movement=0.3, rounding=1e-3, noise=1e-3),
    "bfloat16": Tolerance(loss=2e-2, grad_norm=0.1, movement=0.5, rounding=1e-2, noise=1e-2),
}
"""By the type that is computed in. transformers takes the loss of a float64 model in float32."""


def tolerance_of(dtype: str) -> Tolerance:
    """Return the bounds for a job's `dtype`."""
    return _TOLERANCES[dtype]
