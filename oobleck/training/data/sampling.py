"""The samples of each step, as a pure function of the seed and the step.

Step k takes positions (k - 1)·B to k·B - 1 of an endless sequence, in which each epoch of `num_samples` positions is a
permutation of all samples. A Feistel network computes single values of the permutation, over the smallest even number
of bits that holds every index, with cycle walking for the indices beyond (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", CT-RSA 2002, section 4). It has no state and needs O(1) memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint64]

_NUM_ROUNDS = 6
# From MurmurHash3's 64-bit finaliser, by Austin Appleby (public domain).
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))


def samples_of_step(seed: int, step: int, global_batch_size: int, num_samples: int) -> tuple[int, ...]:
    """Return the indices of a step's samples, in the order in which microbatches take them.

    Steps count from 1. Each sample occurs exactly once per epoch, and an epoch may end within a step.
    """
    assert step >= 1, f"step {step}; steps count from 1"
    assert num_samples >= 1, "no samples"
    first = (step - 1) * global_batch_size
    indices: list[int] = []
    while len(indices) < global_batch_size:
        epoch, offset = divmod(first + len(indices), num_samples)
        count = min(global_batch_size - len(indices), num_samples - offset)
        indices.extend(permuted(seed, epoch, range(offset, offset + count), num_samples))
    return tuple(indices)


def permuted(seed: int, epoch: int, positions: Sequence[int], num_samples: int) -> list[int]:
    """Return the values of an epoch's permutation of [0, num_samples) at `positions`. O(number of positions)."""
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(f"samples:{seed}:{epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = np.array(positions, dtype=np.uint64)
    outside = np.ones(len(values), dtype=bool)
    # The domain is less than four times the number of samples, so an index walks less than four rounds on average.
    while outside.any():
        values[outside] = _feistel(values[outside], keys, np.uint64(half_bits))
        outside = values >= num_samples
    return [int(value) for value in values]


def _feistel(values: Indices, keys: Indices, half_bits: np.uint64) -> Indices:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half_bits) | right


def _mix(values: Indices) -> Indices:
    shift = np.uint64(33)
    for multiplier in _MULTIPLIERS:
        values = (values ^ (values >> shift)) * multiplier
    return values ^ (values >> shift)
