"""What a model's own loss is, or a script's: tried on the head, with made-up hidden states and weights.

transformers gives a model the number of items in a batch, to divide the sum of its losses by. Many classes do not look
at that and return the mean over the labels that they are given; some shift labels, some do not. A step is made of many
microbatches, so what each adds to it must be known: a wrong guess trains with a multiple of the gradient, and no error
says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from oobleck.errors import ConfigError
from oobleck.job import Task
from oobleck.training.counters import changed_since, counter_of, states_of
from oobleck.training.data import IGNORED_LABEL, Batch
from oobleck.training.randomness import MicrobatchKey, drawing_from

from . import losses
from .layered_model import LayeredModel
from .models import StageModel
from .structure import ModelStructure

_LENGTH, _LABELS = 6, 16
"""Tokens of a sample, and how many different ones there are."""
_NUM_SET = 1 << 16
"""Weights of a parameter that are not zero, at most: the rest of a large head costs no memory."""
_NUM_ITEMS = 64
_KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
_NUM_SAMPLES = 4
"""For a loss that a script brings: enough that classes are not as frequent among some as among all."""


def with_tried_loss(structure: ModelStructure) -> ModelStructure:
    """Return the structure with what is known of the loss that it is trained with: its model's own, or a script's.

    Takes as long as building the model without memory. Raises ConfigError for a loss of which it cannot be known what
    each microbatch adds to it.
    """
    if structure.compute_loss is not None:
        return _with_tried(structure, losses.loss_of_outputs(structure.compute_loss), structure.compute_loss)
    if structure.task != "causal_lm":
        return structure
    stage = _on_head(
        StageModel(replace(structure, has_tried_loss=True, drops=False), dtype=torch.float32, device="cpu")
    )
    if isinstance(stage.model, LayeredModel):
        loss = stage.model.loss
        return structure if loss is None else _with_tried(structure, loss, loss, argument="num_items")
    with torch.no_grad(), drawing_from(0):  # its layers seed the generator
        trial = _Trial(stage)
        with stage.evaluating():
            rule = trial.rule()
        trial.require_no_count()
        return replace(structure, loss_rule=rule)


def _with_tried(
    structure: ModelStructure, loss: losses.Loss, given: object, argument: str = "num_items_in_batch"
) -> ModelStructure:
    """The structure with a script's loss tried, unless that takes more than made-up outputs. `given` is the script's
    own, whose argument `argument` is.
    """
    head = CapturedHead()
    if not head.is_run(_on_head(head.stage_of(structure))) or (fault := _fault(loss, head, given)) is None:
        return structure
    if fault:
        raise ConfigError(losses.unfit_loss(given, fault, argument=argument))
    return replace(structure, has_tried_loss=True)


def _on_head(stage: StageModel) -> StageModel:
    """Have a stage hold the last layer, with made-up weights."""
    head = stage.structure.num_layers - 1
    # Logits far apart, and so the losses of tokens: of equal ones any mean is a sum divided by a number.
    stage.adopt(head, head + 1, made_up_weights(stage.structure, head, spread=4.0))
    stage.start_buffers([head])
    return stage


class CapturedHead:
    """What a loss is given by a head, taken in its place."""

    outputs: Any
    labels: torch.Tensor
    ids: torch.Tensor
    """What the labels may be too."""

    def stage_of(self, structure: ModelStructure) -> StageModel:
        """Return a stage of a model, without layers, whose head gives its outputs here."""
        stage = StageModel(structure, dtype=torch.float32, device="cpu")
        if any(buffer.dtype == torch.float64 for buffer in stage.model.buffers()):
            stage = StageModel(structure, dtype=torch.float64, device="cpu")  # what it computes with them is float64
        if isinstance(stage.model, LayeredModel):
            stage.model.loss = self.take
        else:
            stage.compute_loss = self.take
        return stage

    def take(self, outputs: Any, labels: torch.Tensor, _num_items: int) -> torch.Tensor:
        self.outputs, self.labels = outputs, labels.clone()
        return torch.zeros(())

    def logits(self) -> torch.Tensor:
        """Return what a loss would be taken of."""
        logits: torch.Tensor = self.outputs if isinstance(self.outputs, torch.Tensor) else self.outputs.logits
        return logits

    def is_run(self, stage: StageModel) -> bool:
        """Run the head on made-up hidden states. False where it takes more than these."""
        structure = stage.structure
        generator = torch.Generator().manual_seed(1)
        length = min(_LENGTH, structure.sequence_length)
        self.ids = torch.randint(min(_LABELS, structure.config.vocab_size), (_NUM_SAMPLES, length), generator=generator)
        hidden = torch.randn((_NUM_SAMPLES, length, structure.hidden_size), generator=generator)
        batch = Batch(input_ids=self.ids, labels=made_up_labels(structure.task, self.ids))
        with stage.evaluating(), torch.no_grad(), drawing_from(0), suppress(Exception):  # somebody else's code
            stage.forward(batch, hidden, num_items=_NUM_ITEMS, key=_KEY)
            return True
        return False


def _fault(loss: losses.Loss, head: CapturedHead, given: object) -> str | None:
    """What is wrong with a loss, the empty string if nothing; None where it cannot be tried."""

    def number_of(outputs: Any, labels: torch.Tensor, num_items: int) -> torch.Tensor:
        with drawing_from(0):  # as often as it likes, without a trace in the script
            value = loss(outputs, labels, num_items)
        if not value.isfinite():
            raise ArithmeticError("made-up values have no loss")
        return value

    for labels in (head.labels, head.ids):
        with suppress(Exception):  # it is somebody else's code, and may fail in any way
            fault = losses.fault_of_loss(number_of, head.outputs, labels, num_items=_NUM_ITEMS)
            if fault is None and labels.ndim > 1:
                labels = labels.clone()
                labels[0, labels.shape[1] // 2 :] = IGNORED_LABEL
                with suppress(Exception):  # a loss that knows no ignored labels
                    fault = losses.fault_of_loss(number_of, head.outputs, labels, num_items=_NUM_ITEMS)
            return fault or _fault_of_later_calls(number_of, head.outputs, labels, given) or ""
    return None


def _fault_of_later_calls(loss: losses.Loss, outputs: Any, labels: torch.Tensor, given: object) -> str | None:
    first = float(loss(outputs, labels.clone(), _NUM_ITEMS))
    counter = counter_of(
        {losses.name_of(given): given}, lambda: losses.is_same(float(loss(outputs, labels.clone(), _NUM_ITEMS)), first)
    )
    return None if counter is None else f"it depends on {counter}, which changes with every call"


def made_up_labels(task: Task, ids: torch.Tensor) -> torch.Tensor:
    """Return labels of two classes, of which the first sample has more of one, and the others of the other."""
    if task == "sequence_classification":
        return torch.tensor([0, 1, 1, 0]).repeat(len(ids) // 4 + 1)[: len(ids)]
    labels = torch.ones_like(ids)
    labels[0] = 0
    labels[:, -1] = 1 - labels[:, -1]
    return labels


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

    def rule(self) -> losses.LossRule:
        """Find the rule that all losses follow. Raises ConfigError where there is none."""
        both = self._samples()
        one, other = both.take(0, 1).without_last_label(), both.take(1, 2)
        both.batch.labels[0] = one.batch.labels[0]
        together, halved = self._loss(both), self._loss(both, 2 * _NUM_ITEMS)
        alone = self._loss(one), self._loss(other)
        counts_first = self._loss(other.with_other_first_label()) != alone[1]
        if not losses.is_same(again := self._loss(both), together):
            raise ConfigError(
                f"model: {self._name} returns another loss when it runs again on the same samples, {again:g} after "
                f"{together:g}: microbatches are spread over nodes; leave out what depends on earlier forward passes"
            )
        if losses.is_near(2 * halved, together) and losses.is_near(sum(alone), together):
            return losses.LossRule(counts_first=counts_first)
        first = 0 if counts_first else 1
        counts = [int((each.batch.labels[:, first:] != IGNORED_LABEL).sum()) for each in (one, other)]
        mean = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
        if losses.is_near(halved, together) and losses.is_near(mean, together):
            return losses.LossRule(is_mean=True, counts_first=counts_first)
        raise ConfigError(
            f"model: {self._name} returns a loss of which it is not known what each microbatch adds to that of a step: "
            f"{together:g} for two samples, {alone[0]:g} and {alone[1]:g} for each of them, which have {counts[0]} and "
            f"{counts[1]} labels, and {halved:g} for twice as many num_items_in_batch; have it return the sum divided "
            "by num_items_in_batch, or the mean over the labels that are not -100, or give compute_loss_func"
        )

    def require_no_count(self) -> None:
        """Raise ConfigError where the loss depends, sooner or later, on something that changes with every call."""
        both, owners = self._samples(), dict(self._stage.model.named_modules())

        def loss() -> float:
            with drawing_from(0):
                return self._loss(both)

        before, first = states_of(owners), loss()
        if not changed_since(owners, before):
            return
        if (counter := counter_of(owners, lambda: losses.is_same(loss(), first))) is not None:
            raise ConfigError(
                f"model: {self._name} returns another loss later, by {counter}, which changes with every forward pass: "
                "microbatches are spread over nodes; leave out what depends on earlier forward passes"
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


def made_up_weights(structure: ModelStructure, layer: int, *, spread: float = 1.0) -> Mapping[str, torch.Tensor]:
    """Return values for a layer's parameters, of which only the first are not zero: rows of that norm, or about 1."""
    generator = torch.Generator().manual_seed(2)
    made = {}
    for name in structure.layer_parameters(layer):
        if name in structure.buffers:
            continue
        shape = structure.shapes[name]
        scale = 0.1 if len(shape) < 2 else spread / shape[-1] ** 0.5
        made[name] = value = torch.from_numpy(np.zeros(shape, dtype=np.float32))  # pages that are not written are free
        some = value.view(-1)[:_NUM_SET]
        some.copy_(torch.randn(some.shape, generator=generator) * scale + (len(shape) == 1))
    return made
