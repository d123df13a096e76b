"""What a model's own loss is, or a script's: tried on the head, with made-up hidden states and weights.

A step is made of many microbatches, so what each adds to its loss must be known: a wrong guess trains with a multiple
of the gradient, and no error says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers.utils.generic import ModelOutput

from oobleck.errors import ConfigError, UncutModel
from oobleck.job import Task
from oobleck.training.counters import changed_since, counter_of, states_of
from oobleck.training.data import IGNORED_LABEL, Batch
from oobleck.training.randomness import MicrobatchKey, drawing_from

from . import losses
from .configuration import CLASSIFICATION
from .layered_model import LayeredModel
from .models import StageModel
from .structure import ModelStructure

_LENGTH, _LABELS = 6, 16
"""Tokens of a sample, and how many different ones there are."""
_NUM_SET = 1 << 16
"""Weights of a parameter that are not zero, at most: the rest of a large head costs no memory."""
_NUM_ITEMS = 64
_MOST_ROWS, _FEWEST_TOKENS, _MOST_WORK = 256, 2, 1 << 31
"""Of a job's own batch: samples, tokens of each, and products of an element of a layer and a token; beyond that, fewer
and shorter samples stand for it."""
_OF_BLOCKS = {"hidden_states": "output_hidden_states", "attentions": "output_attentions"}
"""What a model returns of its blocks, and by which setting."""
_OF_WEIGHTS = (1 / 256, 1024.0)
"""By what the head's weights are multiplied, one after the other, for logits that are alike, and far apart."""
_NOTHING = 1e-6
"""Losses that are rounding alone."""
# The head counts as at least this wide: a narrower one has fewer parameters, but logits as large.
_LEAST_WIDTH = 1024
_KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
# Enough that classes can be more frequent in a part: weights by frequency must not seem to add up.
_NUM_SAMPLES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """How large a batch is where the script trains by itself, and what becomes of it on nodes."""

    batch: int
    microbatch: int
    length: int

    @property
    def is_cut(self) -> bool:
        """Whether a batch is more than a microbatch."""
        return self.microbatch < self.batch

    def bounded(self, num_elements: int) -> BatchSizes:
        """Return the sizes to try a layer of `num_elements` with: fewer and shorter rows if a batch would take long."""
        tokens = max(_MOST_WORK // max(num_elements, 1), 2 * _FEWEST_TOKENS)
        batch = min(self.batch, _MOST_ROWS, tokens // _FEWEST_TOKENS)
        length = min(self.length, max(tokens // batch, _FEWEST_TOKENS))
        return BatchSizes(batch=batch, microbatch=min(self.microbatch, batch), length=length)


def with_tried_loss(structure: ModelStructure, sizes: BatchSizes | None = None) -> ModelStructure:
    """Return the structure with what is known of the loss that it is trained with: its model's own, or a script's.

    With `sizes`, it is tried on a batch of the job's own size too, up to a bound.

    Takes as long as building the model without memory. Raises ConfigError for a loss of which it cannot be known what
    each microbatch adds to it, and for one of a model with plain labels that is not their cross entropy.
    """
    if structure.compute_loss is not None:
        return _with_tried(structure, losses.loss_of_outputs(structure.compute_loss), structure.compute_loss, sizes)
    if structure.task != "causal_lm":
        _require_label_loss(structure)
        return structure
    stage = _on_head(
        StageModel(replace(structure, has_tried_loss=True, drops=False), dtype=torch.float32, device="cpu")
    )
    if isinstance(stage.model, LayeredModel):
        loss = stage.model.loss
        return structure if loss is None else _with_tried(structure, loss, loss, sizes, argument="num_items")
    with torch.no_grad(), drawing_from(0):  # its layers seed the generator
        trial = _Trial(stage)
        with stage.evaluating():
            rule = trial.rule()
        trial.require_no_count()  # before more calls, which might be what it goes by
        with stage.evaluating():
            for each in trial.others(sizes):
                trial.require_shares(rule, *each)
        return replace(structure, loss_rule=rule)


def _require_label_loss(structure: ModelStructure) -> None:
    """Raise ConfigError where a model with plain labels returns another loss for them than stages compute."""
    head, given = CapturedHead(), dict[str, Any]()
    stage = _on_head(head.stage_of(replace(structure, drops=False)))
    if isinstance(stage.model, LayeredModel):
        return
    # First, so that the script's own hooks see the labels too.
    stage.model.register_forward_pre_hook(
        lambda _module, args, named: (args, {**named, **given}), with_kwargs=True, prepend=True
    )
    # transformers passes the number of items to models that take any argument, of which some return their mean anyway.
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature(stage.model.forward).parameters.values())
    num_items = {"num_items_in_batch": _NUM_ITEMS} if takes_any else {}
    for rows, makes_labels in ((_NUM_SAMPLES, made_up_labels), (2 * _LABELS + 1, _labels_of_all_classes(structure))):
        for scale in (1.0, *_OF_WEIGHTS):
            _scale_weights(stage, scale)
            given.clear()
            if not head.is_run(stage, rows=rows, labels=makes_labels):
                return
            num_labels = int((head.labels != IGNORED_LABEL).sum())
            mean = float(losses.label_loss(head.logits(), head.labels, num_labels))
            given.update(labels=head.labels, **num_items)
            # Of made-up values there may be no loss.
            if not head.is_run(stage, rows=rows, labels=makes_labels) or getattr(head.outputs, "loss", None) is None:
                return
            own = float(head.outputs.loss)
            others = (own, own * _NUM_ITEMS / num_labels) if takes_any else (own,)
            if not math.isfinite(mean) or any(
                losses.is_near(each, mean) or abs(each - mean) < _NOTHING for each in others
            ):
                continue
            raise UncutModel(
                f"model: {type(stage.model).__name__} returns the loss {own:g} for {num_labels} made-up labels whose "
                f"cross entropy is {mean:g}, and for {structure.task} the loss is always the cross entropy of the "
                "logits; leave out what changes it, or set Trainer(compute_loss_func=…)"
            )


def _labels_of_all_classes(structure: ModelStructure) -> Callable[[Task, torch.Tensor], torch.Tensor]:
    num_classes = (
        (structure.config.num_labels or 1) if structure.task in CLASSIFICATION else structure.config.vocab_size
    )

    def labels_of(task: Task, ids: torch.Tensor) -> torch.Tensor:
        count = len(ids) if task == "sequence_classification" else ids.numel()
        labels = torch.arange(count) % num_classes
        if task == "sequence_classification":
            return labels
        labels[-ids.shape[1] // 2 :] = IGNORED_LABEL
        return labels.view(ids.shape)

    return labels_of


def _with_tried(
    structure: ModelStructure,
    loss: losses.Loss,
    given: object,
    sizes: BatchSizes | None,
    argument: str = "num_items_in_batch",
) -> ModelStructure:
    """The structure with a script's loss tried, unless that takes more than made-up outputs. `given` is the script's
    own, whose argument `argument` is.
    """
    head = CapturedHead()
    stage = _on_head(head.stage_of(structure))
    # The structure then stays untried, and the loss is tried on its first microbatch (`losses.tried_at_first`).
    if not head.is_run(stage):
        return structure
    if (read := _read_of_blocks(loss, head, structure)) is not None:
        fault: str | None = (
            f"it reads outputs.{read}, which are those of all blocks, and a node has some of them; have it compute the "
            f"loss from the logits alone, and leave {_OF_BLOCKS[read]} out"
        )
    elif (fault := _fault(loss, head, given)) is None:
        return structure
    own = None if sizes is None else _bounded(sizes, structure)
    # A loss may treat large batches differently, which the few samples above do not show.
    if not fault and own is not None and own.is_cut and head.is_run(stage, rows=own.batch, length=own.length):
        fault = _fault(loss, head, given, size=own.microbatch) or ""
    if fault:
        raise ConfigError(losses.unfit_loss(given, fault, argument=argument))
    return replace(structure, has_tried_loss=True)


def _bounded(sizes: BatchSizes, structure: ModelStructure) -> BatchSizes:
    head = sum(structure.shapes[name].numel() for name in structure.layer_parameters(structure.num_layers - 1))
    return sizes.bounded(max(head, _LEAST_WIDTH * structure.config.vocab_size))


def _on_head(stage: StageModel) -> StageModel:
    head = stage.structure.num_layers - 1
    # Logits far apart, and so the losses of tokens: of equal ones any mean is a sum divided by a number.
    stage.adopt(head, head + 1, made_up_weights(stage.structure, head, spread=4.0))
    stage.start_buffers([head])
    return stage


@torch.no_grad()
def _scale_weights(stage: StageModel, factor: float) -> None:
    for parameter in stage.parameters.values():
        if parameter.ndim > 1:
            parameter.view(-1)[:_NUM_SET].mul_(factor)  # the others are zero, and cost no memory


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

    def is_run(
        self,
        stage: StageModel,
        *,
        rows: int = _NUM_SAMPLES,
        length: int | None = None,
        labels: Callable[[Task, torch.Tensor], torch.Tensor] | None = None,
    ) -> bool:
        """Run the head on made-up hidden states. False where it takes more than these."""
        structure = stage.structure
        generator = torch.Generator().manual_seed(1)
        length = min(_LENGTH, structure.sequence_length) if length is None else length
        self.ids = torch.randint(min(_LABELS, structure.config.vocab_size), (rows, length), generator=generator)
        hidden = torch.randn((rows, length, structure.hidden_size), generator=generator)
        batch = Batch(input_ids=self.ids, labels=(labels or made_up_labels)(structure.task, self.ids))
        with stage.evaluating(), torch.no_grad(), drawing_from(0), suppress(Exception):  # somebody else's code
            stage.forward(batch, hidden, num_items=_NUM_ITEMS, key=_KEY)
            return True
        return False


def _fault(loss: losses.Loss, head: CapturedHead, given: object, size: int | None = None) -> str | None:
    """What is wrong with a loss, the empty string if nothing; None where it cannot be tried.

    With `size`, a batch is compared with microbatches of that many samples, and how large losses are is left as it is.
    """
    num_items = _NUM_ITEMS if size is None else head.ids.numel()

    def number_of(outputs: Any, labels: torch.Tensor, num_items: int) -> torch.Tensor:
        with drawing_from(0):  # as often as it likes, without a trace in the script
            value = loss(outputs, labels, num_items)
        if not value.isfinite():
            raise ArithmeticError("made-up values have no loss")
        return value

    def fault_of(outputs: Any, labels: torch.Tensor) -> str | None:
        return losses.fault_of_loss(number_of, outputs, labels, num_items=num_items, size=size)

    for labels in (head.labels, head.ids):
        with suppress(Exception):  # it is somebody else's code, and may fail in any way
            fault = fault_of(head.outputs, labels)
            if size is None:  # before it has been called more often, which might be what it goes by
                fault = fault or _fault_of_later_calls(number_of, head.outputs, labels, given)
            some = labels.clone()
            if labels.ndim > 1:
                some[0, some.shape[1] // 2 :] = IGNORED_LABEL
            with suppress(Exception):  # a loss that knows no ignored labels
                fault = fault or fault_of(head.outputs, some)
            if size is not None:
                return fault or ""
            with suppress(Exception):  # one that knows no such logits
                others = losses.of_other_sizes(head.outputs, labels)
                fault = fault or next(filter(None, (fault_of(each, labels) for each in others)), None)
            return fault or ""
    return None


def _read_of_blocks(loss: losses.Loss, head: CapturedHead, structure: ModelStructure) -> str | None:
    """Name what a loss reads of the outputs of blocks, which the stage with the head does not have all of."""
    if not isinstance(head.outputs, ModelOutput):
        return None
    for name, setting in _OF_BLOCKS.items():
        if not getattr(structure.config, setting, False):
            continue
        # A loss that reads these outputs is not a number where they are not.
        is_number = []
        with suppress(Exception):  # it is somebody else's code, and may fail in any way
            for value in (0.0, float("nan")):
                outputs = type(head.outputs)(**{**head.outputs, name: _of_blocks(name, structure, head.ids, value)})
                is_number.append(bool(loss(outputs, head.labels.clone(), _NUM_ITEMS).isfinite()))
        if is_number and is_number != [True, True]:
            return name
    return None


def _of_blocks(name: str, structure: ModelStructure, ids: torch.Tensor, value: float) -> tuple[torch.Tensor, ...]:
    (rows, length), heads = ids.shape, getattr(structure.config, "num_attention_heads", None) or 1
    shape = (rows, heads, length, length) if name == "attentions" else (rows, length, structure.hidden_size)
    return tuple(torch.full(shape, value) for _ in range(structure.num_blocks + 1))


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
        self._counts_first = False

    def rule(self) -> losses.LossRule:
        """Find the rule that all losses follow. Raises ConfigError where there is none."""
        # transformers gives a model the number of items in a batch, to divide the sum of its losses by. Many classes
        # return the mean over the labels of their call instead; some shift labels, some do not.
        both = self._samples()
        # With equal numbers of labels, the mean over both samples would also be the mean of their means.
        one, other = both.take(0, 1).without_last_label(), both.take(1, 2)
        both.batch.labels[0] = one.batch.labels[0]
        together, halved = self._loss(both), self._loss(both, 2 * _NUM_ITEMS)
        read = next((name for name in _OF_BLOCKS if not math.isfinite(self._loss_without(name, both))), None)
        if read is not None:
            raise UncutModel(
                f"model: the loss of {self._name} reads {read}, which are those of all blocks, and a node has some of "
                "them; have it compute the loss from the logits alone"
            )
        alone = self._loss(one), self._loss(other)
        # A model that shifts labels never reads a sample's first one, so its loss keeps every bit.
        self._counts_first = counts_first = self._loss(other.with_other_first_label()) != alone[1]
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
        raise UncutModel(
            f"model: {self._name} returns a loss of which it is not known what each microbatch adds to that of a step: "
            f"{together:g} for two samples, {alone[0]:g} and {alone[1]:g} for each of them, which have {counts[0]} and "
            f"{counts[1]} labels, and {halved:g} for twice as many num_items_in_batch; have it return the sum divided "
            "by num_items_in_batch, or the mean over the labels that are not -100, or give compute_loss_func"
        )

    def others(self, sizes: BatchSizes | None) -> Iterator[tuple[_Samples, int]]:
        """Yield samples and how many of them make a microbatch: for small, ordinary and large losses, and a batch of
        the job's own size. Changes the weights of the stage.
        """
        both = self._samples()
        yield self._as_predicted(both, 2), 1
        if sizes is not None and (own := _bounded(sizes, self._stage.structure)).is_cut:
            yield self._samples(own.batch, own.length), own.microbatch
        for scale in _OF_WEIGHTS:
            _scale_weights(self._stage, scale)
            yield both, 1
        yield self._as_predicted(both, 1), 1  # one small and one large: a mean is the same above a bound, and below

    def require_shares(self, rule: losses.LossRule, samples: _Samples, size: int) -> None:
        """Raise ConfigError where the losses of microbatches do not follow the rule that was found."""
        first = 0 if rule.counts_first else 1
        count = len(samples.hidden)
        parts = [samples.take(start, min(start + size, count)) for start in range(0, count, size)]
        counts = [int((each.batch.labels[:, first:] != IGNORED_LABEL).sum()) for each in parts]
        weights = [each / sum(counts) if rule.is_mean else 1 for each in counts]
        together = self._loss(samples, sum(counts))
        shares = [self._loss(each, sum(counts)) * weight for each, weight in zip(parts, weights, strict=True)]
        sizes = [abs(each) for each in (together, *shares)]
        if losses.is_near(sum(shares), together) or max(sizes) < _NOTHING or not math.isfinite(sum(sizes)):
            return  # of made-up values there may be no loss
        raise UncutModel(
            f"model: {self._name} returns a loss of which it is not known what each microbatch adds to that of a step: "
            f"{together:g} for {count} samples, and {sum(shares):g} for microbatches of {size} in all, by {rule}; have "
            "each label's loss count by itself, whatever the size of the batch and of the loss, or give "
            "compute_loss_func"
        )

    def require_no_count(self) -> None:
        """Raise ConfigError where the loss depends, sooner or later, on something that changes with every call."""
        both, owners = self._samples(), dict(self._stage.model.named_modules())

        def loss() -> float:
            with drawing_from(0):
                return self._loss(both)

        before, first = states_of(owners), loss()
        # A count is something that calls change. Most models keep nothing, and need no further calls.
        if not changed_since(owners, before):
            return
        if (counter := counter_of(owners, lambda: losses.is_same(loss(), first))) is not None:
            raise ConfigError(
                f"model: {self._name} returns another loss later, by {counter}, which changes with every forward pass: "
                "microbatches are spread over nodes; leave out what depends on earlier forward passes"
            )

    def _samples(self, rows: int = 2, length: int | None = None) -> _Samples:
        structure = self._stage.structure
        length = min(_LENGTH, structure.sequence_length) if length is None else length
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(min(_LABELS, structure.config.vocab_size), (rows, length), generator=generator)
        hidden = torch.randn((rows, length, structure.hidden_size), generator=generator)
        return _Samples(Batch(input_ids=ids, labels=ids.clone()), hidden)

    def _loss_without(self, name: str, samples: _Samples) -> float:
        """The loss where what blocks return is not a number, if the model asks for it."""
        structure, setting = self._stage.structure, _OF_BLOCKS[name]

        def spoil(_module: object, _arguments: object, asked: dict[str, Any], output: Any) -> None:
            # Outputs that the model does not ask its trunk for are None, and cannot be read.
            if hasattr(output, name) and asked.get(setting, getattr(structure.config, setting, False)):
                setattr(output, name, _of_blocks(name, structure, samples.batch.input_ids, float("nan")))

        trunk: Any = self._stage.model.base_model
        handle = trunk.register_forward_hook(spoil, with_kwargs=True)
        try:
            return self._loss(samples)
        finally:
            handle.remove()

    def _as_predicted(self, samples: _Samples, rows: int) -> _Samples:
        """The first samples with the labels that the head holds to be likely, whose losses are small."""
        head = CapturedHead()
        self._stage.compute_loss = head.take
        try:
            self._loss(samples)
        finally:
            self._stage.compute_loss = None
        labels = samples.batch.labels.clone()
        labels[:rows] = head.logits()[:rows].argmax(-1).roll(0 if self._counts_first else 1, -1)
        return _Samples(replace(samples.batch, labels=labels), samples.hidden)

    def _loss(self, samples: _Samples, num_items: int = _NUM_ITEMS) -> float:
        try:
            return float(self._stage.forward(samples.batch, samples.hidden, num_items=num_items, key=_KEY))
        # It is somebody else's code, and may fail in any way.
        except Exception as error:
            detail = " ".join(str(error).split())
            raise UncutModel(f"model: the loss of {self._name} cannot be tried on its head: {detail}") from error


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
