"""A worker's part in checkpoints: its layers into shared memory, and back from there or from disk."""

from __future__ import annotations

from .digests import digest_of
from .saving import LayerSaver
from .state import FlashSaver, LayerTensors, StateReader
from .trainer_checkpoint import exported_optimizer, import_trainer_checkpoint, is_trainer_checkpoint
from .weights import attach, attached, gathered_in, gathered_weights, newest_checkpoint, newest_weights, read_weights

__all__ = [
    "FlashSaver",
    "LayerSaver",
    "LayerTensors",
    "StateReader",
    "attach",
    "attached",
    "digest_of",
    "exported_optimizer",
    "gathered_in",
    "gathered_weights",
    "import_trainer_checkpoint",
    "is_trainer_checkpoint",
    "newest_checkpoint",
    "newest_weights",
    "read_weights",
]
