"""Arrays over layers and over stages: `[L + 1, L + 1]`, at [i, j] the stage of layers i to j - 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def prefix_sums(values: Sequence[float]) -> Floats:
    """Return 0, then the sum up to each value."""
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])


def differences(sums: Floats) -> Floats:
    """Return the sum of every stage from `prefix_sums`."""
    found: Floats = sums[None, :] - sums[:, None]
    return found


def largest(values: Sequence[float]) -> Floats:
    """Return the largest value of every stage; 0 where a stage would have no layer."""
    size = len(values)
    table = np.zeros((size + 1, size + 1))
    for first in range(size if any(values) else 0):
        table[first, first + 1 :] = np.maximum.accumulate(np.array(values[first:], dtype=np.float64))
    return table
