"""Trials whether padding that a sample receives only because of longer ones next to it changes what it computes.

A batch is cut into microbatches over nodes, and each is padded to its own longest sample. Padding to the left shifts
absolute positions, and layers that look in both directions read padding that no mask hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oobleck.errors import UncutModel
from oobleck.training.data import Batch, PaddedRow
from oobleck.training.model import CapturedHead, ModelStructure, StageModel, made_up_weights
from oobleck.training.randomness import MicrobatchKey, drawing_alike

_Array = npt.NDArray[Any]

_OWN, _PADDING = 6, 3
"""Tokens of a sample, and tokens of padding next to them, that are tried."""
_FIRST_IDS = 64
"""Made-up embeddings may have values for these tokens only."""
_NUM_TOKENS = 16
"""How many different tokens a sample has."""
_ALIKE = 1e-4
"""By how much results may differ, as a share of the largest."""
_KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
_IDS, _MASK = "input_ids", "attention_mask"


def try_padding(structure: ModelStructure, rows: Sequence[PaddedRow], *, place: str) -> None:
    """Raise UncutModel if the model computes a sample differently with the padding that others cause.

    `place` names the source of the rows. Runs a layer of each kind, with made-up weights, on a few tokens of the rows;
    what does not run is not tried.
    """
    captured = CapturedHead()
    stage: StageModel | None = None
    tried: set[tuple[bool, bool]] = set()
    for row in rows:
        for is_left in (True, False):
            # Rows of one form differ by their tokens alone.
            form = (is_left, _MASK in row.padded)
            if form in tried or not (row.num_left if is_left else row.num_right):
                continue
            tried.add(form)
            if stage is None:
                stage = captured.stage_of(replace(structure, drops=False, draws_at_random=False, weights=None))
            if (layer := _layer_that_differs(stage, captured, row, is_left=is_left)) is not None:
                raise UncutModel(
                    f"{place}: {_fault(stage, row, layer, is_left=is_left)}",
                    reason="samples are computed differently with more padding",
                )


def _fault(stage: StageModel, row: PaddedRow, layer: int, *, is_left: bool) -> str:
    side, mask = "left" if is_left else "right", f"{'with' if _MASK in row.padded else 'without'} an {_MASK}"
    structure, token = stage.structure, ""
    if layer == structure.num_layers - 1:
        # Heads of classifiers recognize padding by its token, whatever the mask.
        token = f", by model.config.pad_token_id = {structure.config.pad_token_id}"
    return (
        f"{row.made_by} pads samples on the {side} to the longest of their batch, {mask}, and "
        f"{type(stage.model).__name__} computes a sample differently with more padding (in its "
        f"{structure.layer_names[layer]}); batches are cut into microbatches over nodes, each of which has its own "
        f"longest sample; pad on the right{token}, with an {_MASK} that is 0 there, or pad all samples to one length "
        '(padding="max_length")'
    )


def _layer_that_differs(stage: StageModel, captured: CapturedHead, row: PaddedRow, *, is_left: bool) -> int | None:
    structure = stage.structure
    kinds: set[object] = set()
    # The layers are the user's code, and may fail on a few tokens in any way; such layers are not tried.
    try:
        pair = _Pair.of(structure, row, is_left=is_left)
        hidden: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        for layer in range(structure.num_layers):
            is_head = layer == structure.num_layers - 1
            # Other heads compute each token by itself; that of a classifier looks for a sample's last one.
            if structure.layer_kind(layer) in kinds or (is_head and structure.task != "sequence_classification"):
                continue
            kinds.add(structure.layer_kind(layer))
            stage.adopt(layer, layer + 1, made_up_weights(structure, layer))
            stage.start_buffers([layer])
            outputs = []
            for batch, received in zip((pair.padded, pair.alone), hidden, strict=True):
                with stage.evaluating(), torch.no_grad(), drawing_alike(0):
                    output = stage.forward(batch, received, num_items=1, key=_KEY)
                outputs.append(captured.logits() if is_head else output)
            padded, alone = outputs
            if layer == 0:
                hidden = padded, alone
            if not is_head:
                padded, alone = padded[0, pair.own], alone[0, pair.own_alone]
            if (padded - alone).abs().max() > _ALIKE * alone.abs().max():
                return layer
    except Exception:  # noqa: BLE001
        return None
    return None


@dataclass(frozen=True, slots=True)
class _Pair:
    """Some of a sample's tokens, with the padding next to them and without it."""

    padded: Batch
    alone: Batch
    own: torch.Tensor
    """Where the sample's tokens are in the padded row."""
    own_alone: torch.Tensor

    @classmethod
    def of(cls, structure: ModelStructure, row: PaddedRow, *, is_left: bool) -> _Pair:
        length, num_left = len(row.alone[_IDS]), row.num_left
        mask = row.alone.get(_MASK)
        # A collator may also pad a sample that is alone, to a multiple of some length.
        real = np.flatnonzero(mask) if mask is not None and mask.ndim == 1 else np.arange(length)
        if is_left:
            window = slice(0, min(int(real[0]) + _OWN, length))
            wider = slice(max(num_left - _PADDING, 0), num_left + window.stop)
        else:
            window = slice(max(int(real[-1]) + 1 - _OWN, 0), length)
            wider = slice(num_left + window.start, min(num_left + length + _PADDING, len(row.padded[_IDS])))
        real = real[(real >= window.start) & (real < window.stop)]
        ids, ids_alone = _made_up_ids(structure, row)
        return cls(
            _batch_of(structure, {**row.padded, _IDS: ids}, wider),
            _batch_of(structure, {**row.alone, _IDS: ids_alone}, window),
            torch.from_numpy(real + num_left - wider.start),
            torch.from_numpy(real - window.start),
        )


def _made_up_ids(structure: ModelStructure, row: PaddedRow) -> tuple[_Array, _Array]:
    """Return the tokens of both rows: the sample's own are others, for which there are made-up embeddings."""
    length, first = len(row.alone[_IDS]), row.num_left
    ids = row.padded[_IDS].astype(np.int64)
    padding = {getattr(structure.config, "pad_token_id", None), *ids[:first].tolist(), *ids[first + length :].tolist()}
    known = [each for each in range(min(structure.config.vocab_size, _FIRST_IDS)) if each not in padding][:_NUM_TOKENS]
    own = np.array([each if each in padding else known[each % len(known)] for each in row.alone[_IDS].tolist()])
    ids[first : first + length] = own
    return ids, own


def _batch_of(structure: ModelStructure, row: Mapping[str, _Array], window: slice) -> Batch:
    length = len(row[_IDS])
    others = {}
    for name in sorted(row.keys() & structure.takes):
        values = row[name]
        if values.shape[:1] == (length,):
            values = values[window]
        if name == _MASK and values.ndim > 1:  # which token sees which
            values = values[..., window] if values.ndim == 2 else values[..., window, window]
        if values.dtype.kind == "f" or values.ndim < 2:
            values = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
        others[name] = torch.from_numpy(np.ascontiguousarray(values))[None]
    ids = torch.from_numpy(row[_IDS][window])[None]
    labels = torch.zeros(1 if structure.task == "sequence_classification" else ids.shape, dtype=torch.int64)
    return Batch(input_ids=ids, labels=labels, others=others)
