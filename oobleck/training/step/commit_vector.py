"""What all workers must agree on to commit, as one small vector that an all-reduce sums.

[the step's sums, …, how often each of its microbatches was counted, …], in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Commit", "commit_vector", "counted_in", "read_commit", "tally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What all workers learn from the commit's all-reduce; equal everywhere to the last bit."""

    loss: float
    grad_norm: float
    stop: bool
    save: bool
    counted: tuple[int, ...]
    """The microbatches of the step that were counted, as often as they were, sorted."""


def commit_vector(
    *, loss: float, squared_grad_norm: float, stop: bool, save: bool, counts: Mapping[int, int], num_microbatches: int
) -> torch.Tensor:
    """Return what a worker brings to a step's commit: its part of the loss and of the norm, its wishes, its counts."""
    return tally([loss, squared_grad_norm, float(stop), float(save)], counts, num_microbatches)


def read_commit(vector: torch.Tensor) -> Commit:
    """Return what the sum of all workers' vectors says."""
    loss, squared_grad_norm, stops, saves, *counts = vector.tolist()
    return Commit(
        loss=loss, grad_norm=squared_grad_norm**0.5, stop=stops > 0, save=saves > 0, counted=counted_in(counts)
    )


def tally(head: Sequence[float], counts: Mapping[int, int], num_microbatches: int) -> torch.Tensor:
    """Return a vector of some numbers, and of how often each microbatch was counted."""
    vector = torch.zeros(len(head) + num_microbatches, dtype=torch.float64)
    vector[: len(head)] = torch.tensor(head, dtype=torch.float64)
    for microbatch, count in counts.items():
        vector[len(head) + microbatch] = count
    return vector


def counted_in(counts: Sequence[float]) -> tuple[int, ...]:
    """Microbatches, each as often as it was counted."""
    return tuple(microbatch for microbatch, count in enumerate(counts) for _ in range(round(count)))
