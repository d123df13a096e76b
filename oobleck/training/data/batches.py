"""What flows into a model: named tensors, and the labels to predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

IGNORED_LABEL = -100
"""A label that is not to be predicted, as transformers marks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples side by side.

    `labels` are not shifted: in causal language modelling, position i of a sample is predicted from the positions
    before it, which is the model's own business, so labels usually are the input itself. In masked language modelling
    they are what was there before some of the input was masked.
    """

    input_ids: torch.Tensor
    """[batch, length], int64."""
    labels: torch.Tensor
    """[batch, length], int64; [batch] where a whole sample has one."""
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What else the model's forward is to be given, by its names: masks, positions, types. [batch, …]"""
    is_causal: bool = True
    """Whether each sample's first label predicts nothing, as the model shifts labels."""
    counted: int | None = None
    """`num_items`, where it is known already."""

    @property
    def num_items(self) -> int:
        """Labels that count: all unless ignored, but for each sample's first if causal. May wait for the device."""
        if self.counted is not None:
            return self.counted
        labels = self.labels[:, 1:] if self.is_causal else self.labels
        return int((labels != IGNORED_LABEL).sum())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`, itself if it is there."""
        return Batch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            others={name: tensor.to(device, non_blocking=True) for name, tensor in self.others.items()},
            is_causal=self.is_causal,
            counted=self.num_items,
        )
