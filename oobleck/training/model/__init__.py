"""Models: how an unmodified model comes apart into layers, and the part of it that a worker holds."""

from __future__ import annotations

from .compilation import require_compiler
from .configuration import Task, build_model
from .models import MicrobatchKey, StageModel
from .precision import Precision
from .structure import ModelStructure
from .tensor_parallel import Share, initialize_share, install, share_of
from .weight_gradients import WeightGradients

__all__ = [
    "MicrobatchKey",
    "ModelStructure",
    "Precision",
    "Share",
    "StageModel",
    "Task",
    "WeightGradients",
    "build_model",
    "initialize_share",
    "install",
    "require_compiler",
    "share_of",
]
