"""From a job's `dtype` to what parameters are kept in and what is computed in.

`float32` and `float64` keep and compute in one type. `bfloat16` and `float16` are mixed precision: parameters,
gradients and optimizer state stay float32, and torch's autocast computes what is safe to in the short type. Hidden
states go from stage to stage in the type that is computed in: half the bytes, and one rounding for each cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What a stage keeps and computes in."""

    parameters: torch.dtype
    autocast: torch.dtype | None = None
    """What autocast computes in; None for no autocast."""

    @classmethod
    def of(cls, dtype: str) -> Precision:
        """Read a job's `dtype`."""
        named: torch.dtype = getattr(torch, dtype)
        if named in (torch.float32, torch.float64):
            return cls(parameters=named)
        return cls(parameters=torch.float32, autocast=named)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would be lost below the smallest number: float16 has five bits of exponent."""
        return self.autocast == torch.float16
