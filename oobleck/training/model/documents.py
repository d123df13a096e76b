"""Whether a model keeps documents apart that share a sample: tried on the masks that it hands to its blocks.

Positions that begin again say where a document begins. transformers makes block-diagonal masks of them, for most of its
models; in the others tokens would see documents that are not theirs, and no error would say so.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .models import StageModel
from .structure import ModelStructure

_POSITIONS = ((0, 1, 2, 0, 1, 2, 3),)
_LENGTH, _SECOND = 7, 3
"""Tokens in all, and where the second document begins."""


def separates_documents(structure: ModelStructure) -> bool:
    """Return whether no token sees another document's, where positions begin again within a sample.

    The model's own code runs over placeholders alone: no layer has memory. Takes as long as building the model.
    """
    if "position_ids" not in structure.takes:
        return False
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    if not isinstance(stage.model, PreTrainedModel):
        return False
    handed: list[list[Any]] = []
    blocks = stage.model.get_submodule(structure.anatomy.block_list)
    for block in blocks.children():
        block.register_forward_pre_hook(
            lambda _module, arguments, keywords: handed.append([*arguments[1:], *keywords.values()]), with_kwargs=True
        )
    ids, positions = torch.zeros((1, _LENGTH), dtype=torch.int64), torch.tensor(_POSITIONS)
    with torch.no_grad():
        stage.model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return len(handed) == structure.num_blocks and all(any(map(_hides_the_first, values)) for values in handed)


def _hides_the_first(value: Any) -> bool:
    """Whether a value is a mask [batch, heads, queries, keys] that hides the first document from the second."""
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or value.shape[-2:] != (_LENGTH, _LENGTH):
        return False
    hidden = ~value if value.dtype == torch.bool else value < -1e4
    return bool(hidden[..., _SECOND:, :_SECOND].all()) and not bool(hidden.diagonal(dim1=-2, dim2=-1).any())
