"""Whether a run trains as the script does by itself: what each of the two did, and what differs first."""

from __future__ import annotations

from .accounts import PlainAccount, PlainJob, StepAccount, TensorDifference, TensorsAsked, TensorsCompared
from .comparison import Comparison, Difference, compare
from .tolerance import Tolerance, tolerance_of

__all__ = [
    "Comparison",
    "Difference",
    "PlainAccount",
    "PlainJob",
    "StepAccount",
    "TensorDifference",
    "TensorsAsked",
    "TensorsCompared",
    "Tolerance",
    "compare",
    "tolerance_of",
]
