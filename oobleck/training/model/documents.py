"""Whether a model keeps the documents of a sample apart."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .models import StageModel
from .structure import ModelStructure

_POSITIONS = ((0, 1, 2, 0, 1, 2, 3),)
_LENGTH, _SECOND = 7, 3
"""The number of tokens, and the index of the second document's first."""


def separates_documents(structure: ModelStructure) -> bool:
    """Return whether tokens attend only to their own document. Takes about as long as building the model."""
    # A document begins where positions start again. Most models of transformers derive block-diagonal masks from
    # positions; in the others, tokens would silently attend to other documents.
    if "position_ids" not in structure.takes:
        return False
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    if not isinstance(stage.model, PreTrainedModel):
        return False
    arguments_of_blocks: list[list[Any]] = []
    blocks = stage.model.get_submodule(structure.anatomy.block_list)
    for block in blocks.children():
        block.register_forward_pre_hook(
            lambda _module, args, kwargs: arguments_of_blocks.append([*args[1:], *kwargs.values()]), with_kwargs=True
        )
    ids, positions = torch.zeros((1, _LENGTH), dtype=torch.int64), torch.tensor(_POSITIONS)
    with torch.no_grad():
        stage.model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    has_run = len(arguments_of_blocks) == structure.num_blocks
    return has_run and all(any(map(_hides_the_first, arguments)) for arguments in arguments_of_blocks)


def _hides_the_first(value: Any) -> bool:
    """Return whether a value is a mask [batch, heads, queries, keys] that hides the first document from the second."""
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or value.shape[-2:] != (_LENGTH, _LENGTH):
        return False
    hidden = ~value if value.dtype == torch.bool else value < -1e4
    return bool(hidden[..., _SECOND:, :_SECOND].all()) and not bool(hidden.diagonal(dim1=-2, dim2=-1).any())
