"""Optimizers, learning rates and loss scales."""

from __future__ import annotations

from .learning_rate import rate_factor
from .loss_scale import LossScale
from .optimizer import MISSED, Optimizer

__all__ = ["MISSED", "LossScale", "Optimizer", "rate_factor"]
