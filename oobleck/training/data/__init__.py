"""Data: text, tokens, records and samples, from wherever they lie, as batches."""

from __future__ import annotations

from .batches import IGNORED_LABEL, Batch
from .data import Dataset, open_source, prepare_dataset
from .records import NO_SAMPLE
from .sampling import samples_of_step
from .script_data import ScriptSamples
from .shard_scanner import ShardScanner

__all__ = [
    "IGNORED_LABEL",
    "NO_SAMPLE",
    "Batch",
    "Dataset",
    "ScriptSamples",
    "ShardScanner",
    "open_source",
    "prepare_dataset",
    "samples_of_step",
]
