"""Masked language modelling: which tokens of a sample are predicted, and what stands in their places.

Devlin et al., "BERT", NAACL 2019, section 3.1: of the chosen tokens 80 % become the mask token, 10 % another token,
10 % stay. One thing differs: every sample has exactly the same number of chosen tokens, so that what a step's loss is
averaged over is known beforehand. The choice depends on (seed, step, sample) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oobleck.training.randomness import derive_seed

from .batches import IGNORED_LABEL, Batch

__all__ = ["Masking"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """How samples are masked."""

    seed: int
    probability: float
    mask_id: int
    vocab_size: int
    """Other tokens are drawn from so many."""

    def num_masked(self, sequence_length: int) -> int:
        """Predicted tokens in each sample."""
        return max(1, round(self.probability * sequence_length))

    def masked(self, samples: torch.Tensor, indices: Sequence[int], step: int) -> Batch:
        """Mask samples [batch, length], whose numbers are `indices`, for a step."""
        inputs, labels = samples.clone(), torch.full_like(samples, IGNORED_LABEL)
        length = samples.shape[1]
        count = self.num_masked(length)
        for row, index in enumerate(indices):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "mask", step, index))
            chosen = torch.randperm(length, generator=generator)[:count]
            fate = torch.rand(count, generator=generator)
            others = torch.randint(0, self.vocab_size, (count,), generator=generator)
            labels[row, chosen] = samples[row, chosen]
            stays = torch.where(fate < 0.9, others, samples[row, chosen])
            inputs[row, chosen] = torch.where(fate < 0.8, torch.full_like(others, self.mask_id), stays)
        return Batch(input_ids=inputs, labels=labels, is_causal=False)
