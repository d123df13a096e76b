"""What a model's own loss is: tried on its head, with made-up hidden states and weights.

transformers gives a model the number of items in a batch, to divide the sum of its losses by. Many classes do not look
at that and return the mean over the labels that they are given; some shift labels, some do not. A step is made of many
microbatches, so what each adds to it must be known: a wrong guess trains with a multiple of the gradient, and no error
says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.training.data import IGNORED_LABEL, Batch
from oobleck.training.randomness import MicrobatchKey, drawing_from

from .losses import LossRule
from .models import StageModel
from .structure import ModelStructure

_LENGTH, _LABELS = 6, 16
"""Tokens of a sample, and how many different ones there are."""
_NUM_SET = 1 << 16
"""Weights of a parameter that are not zero, at most: the rest of a large head costs no memory."""
_NUM_ITEMS = 64
_KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
_TOLERANCE = 1e-3


def with_tried_loss(structure: ModelStructure) -> ModelStructure:
    """Return the structure with what its model's own loss is, where that is what it is trained with.

    Takes as long as building the model without memory. Raises ConfigError for a loss of which it cannot be known what
    each microbatch adds to it.
    """
    if structure.compute_loss is not None or structure.task != "causal_lm":
        return structure
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    if not isinstance(stage.model, PreTrainedModel):
        return structure  # a list of layers, whose loss is given a number to divide by
    head = structure.num_layers - 1
    stage.adopt(head, head + 1, _weights(structure, head))
    with stage.evaluating(), torch.no_grad(), drawing_from(0):  # its layers seed the generator
        return replace(structure, loss_rule=_Trial(stage).rule())


@dataclass(frozen=True, slots=True)
class _Samples:
    batch: Batch
    hidden: torch.Tensor

    def take(self, first: int, stop: int) -> _Samples:
        ids, labels = self.batch.input_ids[first:stop], self.batch.labels[first:stop]
        return _Samples(Batch(input_ids=ids, labels=labels), self.hidden[first:stop])

    def without_last_label(self) -> _Samples:
        labels = self.batch.labels.clone()
        labels[:, -1] = IGNORED_LABEL
        return _Samples(replace(self.batch, labels=labels), self.hidden)

    def with_other_first_label(self) -> _Samples:
        labels = self.batch.labels.clone()
        labels[:, 0] = (labels[:, 0] == 0).long()
        return _Samples(replace(self.batch, labels=labels), self.hidden)


class _Trial:
    """Losses of two samples, together and alone."""

    def __init__(self, stage: StageModel) -> None:
        self._stage = stage
        self._name = type(stage.model).__name__

    def rule(self) -> LossRule:
        """Find the rule that all losses follow. Raises ConfigError where there is none."""
        both = self._samples()
        one, other = both.take(0, 1).without_last_label(), both.take(1, 2)
        both.batch.labels[0] = one.batch.labels[0]
        together, halved = self._loss(both), self._loss(both, 2 * _NUM_ITEMS)
        alone = self._loss(one), self._loss(other)
        counts_first = self._loss(other.with_other_first_label()) != alone[1]
        if _is_near(2 * halved, together) and _is_near(sum(alone), together):
            return LossRule(counts_first=counts_first)
        first = 0 if counts_first else 1
        counts = [int((each.batch.labels[:, first:] != IGNORED_LABEL).sum()) for each in (one, other)]
        mean = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
        if _is_near(halved, together) and _is_near(mean, together):
            return LossRule(is_mean=True, counts_first=counts_first)
        raise ConfigError(
            f"model: {self._name} returns a loss of which it is not known what each microbatch adds to that of a step: "
            f"{together:g} for two samples, {alone[0]:g} and {alone[1]:g} for each of them, which have {counts[0]} and "
            f"{counts[1]} labels, and {halved:g} for twice as many num_items_in_batch; have it return the sum divided "
            "by num_items_in_batch, or the mean over the labels that are not -100, or give compute_loss_func"
        )

    def _samples(self) -> _Samples:
        structure = self._stage.structure
        length = min(_LENGTH, structure.sequence_length)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(min(_LABELS, structure.config.vocab_size), (2, length), generator=generator)
        hidden = torch.randn((2, length, structure.hidden_size), generator=generator)
        return _Samples(Batch(input_ids=ids, labels=ids.clone()), hidden)

    def _loss(self, samples: _Samples, num_items: int = _NUM_ITEMS) -> float:
        try:
            return float(self._stage.forward(samples.batch, samples.hidden, num_items=num_items, key=_KEY))
        # It is somebody else's code, and may fail in any way.
        except Exception as error:
            detail = " ".join(str(error).split())
            raise ConfigError(f"model: the loss of {self._name} cannot be tried on its head: {detail}") from error


def _weights(structure: ModelStructure, layer: int) -> Mapping[str, torch.Tensor]:
    """Values for a layer's parameters, of which only the first are not zero."""
    generator = torch.Generator().manual_seed(2)
    made = {}
    for name in structure.layer_parameters(layer):
        shape = structure.shapes[name]
        made[name] = value = torch.from_numpy(np.zeros(shape, dtype=np.float32))  # pages that are not written are free
        some = value.view(-1)[:_NUM_SET]
        some.copy_(torch.randn(some.shape, generator=generator) * 0.1 + (len(shape) == 1))
    return made


def _is_near(value: float, other: float) -> bool:
    return abs(value - other) <= _TOLERANCE * max(abs(value), abs(other))
