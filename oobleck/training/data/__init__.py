"""Data: text, tokens, records and samples from all kinds of sources, as batches.

Names that need torch are loaded on their first use, since a process without torch tokenizes text.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .records import NO_SAMPLE
from .sampling import samples_of_step
from .shard_scanner import ShardScanner

if TYPE_CHECKING:
    from .batches import IGNORED_LABEL, Batch, WholeBatch, mapped_tensors
    from .collator_trial import PaddedRow, try_collator, try_repeats
    from .data import Dataset, EvaluationBatches, open_source, prepare_dataset
    from .samples import ModelInputs, WholeInputs
    from .script_data import CollatedSamples, ScriptSamples, blaming, from_all_over, items_of, numbers_in
    from .script_stream import ScriptStream

__all__ = [
    "IGNORED_LABEL",
    "NO_SAMPLE",
    "Batch",
    "CollatedSamples",
    "Dataset",
    "EvaluationBatches",
    "ModelInputs",
    "PaddedRow",
    "ScriptSamples",
    "ScriptStream",
    "ShardScanner",
    "WholeBatch",
    "WholeInputs",
    "blaming",
    "from_all_over",
    "items_of",
    "mapped_tensors",
    "numbers_in",
    "open_source",
    "prepare_dataset",
    "samples_of_step",
    "try_collator",
    "try_repeats",
]

_WITH_TORCH = {
    "Batch": "batches",
    "CollatedSamples": "script_data",
    "Dataset": "data",
    "EvaluationBatches": "data",
    "IGNORED_LABEL": "batches",
    "ModelInputs": "samples",
    "PaddedRow": "collator_trial",
    "ScriptSamples": "script_data",
    "ScriptStream": "script_stream",
    "WholeBatch": "batches",
    "WholeInputs": "samples",
    "blaming": "script_data",
    "from_all_over": "script_data",
    "items_of": "script_data",
    "mapped_tensors": "batches",
    "numbers_in": "script_data",
    "open_source": "data",
    "prepare_dataset": "data",
    "try_collator": "collator_trial",
    "try_repeats": "collator_trial",
}


def __getattr__(name: str) -> object:
    if name in _WITH_TORCH:
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
