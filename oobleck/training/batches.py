"""What flows into a model: token ids and the labels to predict."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["IGNORED_LABEL", "Batch"]

IGNORED_LABEL = -100
"""A label that is not to be predicted, as transformers marks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples side by side.

    `labels` are not shifted: position i of a sample is predicted from the positions before it, which is the
    model's own business, so labels usually are the input itself.
    """

    input_ids: torch.Tensor
    """[batch, length], int64."""
    labels: torch.Tensor
    """[batch, length], int64."""

    @property
    def num_items(self) -> int:
        """Predicted tokens: every label but each sample's first, unless ignored. Waits for the device."""
        return int((self.labels[:, 1:] != IGNORED_LABEL).sum())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`, itself if it is there."""
        return Batch(
            input_ids=self.input_ids.to(device, non_blocking=True), labels=self.labels.to(device, non_blocking=True)
        )
