"""Activation checkpointing: a block keeps its input alone, and computes what is between again on the way back.

It wraps `forward` rather than the module, so that what a stage does around a block (seeding, handing in what was
received) happens once and outside. Dropout draws the same numbers again. Chen et al., "Training Deep Nets with
Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["recompute_activations"]


def recompute_activations(module: nn.Module, *, draws_at_random: bool) -> None:
    """Make `module` forget its activations, in training, until its backward pass."""
    forward = module.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=draws_at_random, **kwargs)

    module.forward = forgetful
