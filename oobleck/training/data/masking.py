"""Masked language modelling: which tokens of a sample are predicted, and what stands in their places.

Devlin et al., "BERT", NAACL 2019, section 3.1: of the chosen tokens 80 % become the mask token, 10 % another token,
10 % stay. One thing differs: every sample of a length has exactly the same number of chosen tokens. The choice depends
on (seed, step, sample) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oobleck.training.randomness import derive_seed

from .batches import IGNORED_LABEL, Batch


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

    def masked(
        self, samples: torch.Tensor, indices: Sequence[int], step: int, *, eligible: torch.Tensor | None = None
    ) -> Batch:
        """Mask samples [batch, length], whose numbers are `indices`, for a step; only tokens that are `eligible`."""
        inputs, labels = samples.clone(), torch.full_like(samples, IGNORED_LABEL)
        for row, index in enumerate(indices):
            tokens = torch.arange(samples.shape[1]) if eligible is None else eligible[row].nonzero()[:, 0]
            count = min(len(tokens), self.num_masked(len(tokens)))
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "mask", step, index))
            chosen = tokens[torch.randperm(len(tokens), generator=generator)[:count]]
            fate = torch.rand(count, generator=generator)
            others = torch.randint(0, self.vocab_size, (count,), generator=generator)
            labels[row, chosen] = samples[row, chosen]
            stays = torch.where(fate < 0.9, others, samples[row, chosen])
            inputs[row, chosen] = torch.where(fate < 0.8, torch.full_like(others, self.mask_id), stays)
        return Batch(input_ids=inputs, labels=labels, is_causal=False)
