"""What stages recompute, so that they fit their memory in the least time.

A block keeps all of its activations, or recomputes some of them (`selective`) or all. In a stage whose memory allows k
microbatches in flight at the cheapest level only, as many blocks as possible keep more. Blocks are about alike, so two
neighbouring levels are enough for the least time, and how many blocks take the one or the other is a division.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .profiles import LEVELS, Profile, activation_bytes, more_s, transient_bytes
from .tables import Floats, differences, largest, prefix_sums

Counts = NDArray[np.int64]

_ALL_LEVELS = ("none", *LEVELS)
# The levels of the first blocks of a stage and of those after them. Of equally fast pairs the first is taken.
_PAIRS = ((0, 1), (1, 2), (0, 2))


class Recomputation:
    """The levels of the blocks of all stages of one profile, in tables over stages (`tables.py`)."""

    def __init__(self, profile: Profile, device_counts: Sequence[int]) -> None:
        layers = profile.layers
        is_block = [bool(layer.recomputed) for layer in layers]
        self.is_chosen = any(is_block)
        """Whether there is anything to choose."""
        self._before = prefix_sums(is_block).astype(np.int64)  # blocks before each layer
        self._num_blocks = np.maximum(self._before[None, :] - self._before[:, None], 0)
        blocks = [layer for layer in layers if layer.recomputed]
        kept = [[activation_bytes(layer, level) for layer in layers] for level in _ALL_LEVELS]
        self._kept = [differences(prefix_sums(each)) for each in kept]
        self._transient = [largest([transient_bytes(each, level) for each in layers]) for level in _ALL_LEVELS]
        self._most_transient = np.maximum.reduce(self._transient)
        self._gain = {
            pair: largest([upper - lower for upper, lower in zip(kept[pair[0]], kept[pair[1]], strict=True)])
            for pair in _PAIRS
        }
        # By how many seconds the blocks up to each take longer.
        self._more = {
            count: [prefix_sums([more_s(block, level, count) for block in blocks]) for level in _ALL_LEVELS]
            for count in device_counts
        }
        self._known: dict[tuple[int, int], tuple[Floats, Counts, Counts]] = {}

    def most_in_flight(self, room: Floats, outputs: Floats) -> Floats:
        """Return how many microbatches in flight fit; negative where none does, and not even the state.

        `room` is what is left of the memory for activations and a pass, `outputs` what a microbatch holds besides.
        """
        found = np.full(room.shape, -1.0)
        for level in (0, len(_ALL_LEVELS) - 1):
            left = room - (self._transient[level] if level == 0 else self._most_transient)
            each = self._kept[level] + outputs
            # A stage that keeps no activations divides by 0; the line after that lets it take any number.
            with np.errstate(divide="ignore", invalid="ignore"):
                most = np.floor(left / each)
            most[(each <= 0) & (left >= 0)] = np.inf
            most[left < 0] = -1
            found = np.maximum(found, most)
        return found

    def without(self, first: Counts, stop: Counts) -> tuple[Floats, Floats]:
        """Return what a pass of some stages takes, and what they keep of a microbatch, if they recompute nothing."""
        return self._transient[0][first, stop], self._kept[0][first, stop]

    def choose(self, num_devices: int, in_flight: int, room: Floats, outputs: Floats) -> tuple[Floats, Counts, Counts]:
        """Return by how many seconds stages take longer, and how many blocks recompute some and all of it.

        The seconds are infinite where not even the cheapest level fits. See `most_in_flight`.
        """
        key = num_devices, in_flight
        if key not in self._known:
            self._known[key] = self._chosen(num_devices, in_flight, room, outputs)
        return self._known[key]

    def _chosen(self, num_devices: int, in_flight: int, room: Floats, outputs: Floats) -> tuple[Floats, Counts, Counts]:
        first, number, more = self._before[:-1], self._num_blocks, self._more[num_devices]
        first = np.append(first, self._before[-1])[:, None]
        fits_whole = room - self._transient[0] - in_flight * (self._kept[0] + outputs) >= 0
        best = np.where(fits_whole, 0.0, np.inf)
        selective = recomputed = np.zeros(room.shape, dtype=np.int64)
        for upper, lower in _PAIRS:
            left = room - (np.maximum(*self._transient[:2]) if lower == 1 else self._most_transient)
            left = left - in_flight * (self._kept[lower] + outputs)
            with np.errstate(divide="ignore", invalid="ignore"):
                above = np.nan_to_num(np.floor(left / (in_flight * self._gain[upper, lower])), posinf=np.inf)
            above = np.clip(above, 0, number).astype(np.int64)
            end = np.minimum(first + number, self._before[-1])
            middle = np.minimum(first + above, end)
            seconds = more[upper][middle] - more[upper][first] + more[lower][end] - more[lower][middle]
            better = (left >= 0) & (seconds < best)
            best = np.where(better, seconds, best)
            at = {_ALL_LEVELS[upper]: above, _ALL_LEVELS[lower]: number - above}
            selective = np.where(better, at.get("selective", 0), selective)
            recomputed = np.where(better, at.get("all", 0), recomputed)
        return best, selective, recomputed
