"""Batches for a model: named tensors and the labels to predict, and the masking of masked language models.

Masking follows Devlin et al., "BERT", NAACL 2019, section 3.1. We differ in one point: all samples of a length have
exactly the same number of chosen tokens. The choice depends on (seed, step, sample) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from oobleck.errors import ConfigError
from oobleck.training.randomness import derive_seed

IGNORED_LABEL = -100
"""The label of a position that is not to be predicted, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples side by side.

    `labels` are not shifted. In causal language modelling the model itself predicts position i from the positions
    before it, so labels usually equal the input. In masked language modelling they are the input before masking.
    """

    input_ids: torch.Tensor
    """[batch, length], int64."""
    labels: torch.Tensor
    """[batch, length], int64; or [batch] for whole samples; [batch, length + 1] in a part of samples (`part`)."""
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further arguments of the model's forward, keyed by name: masks, positions, types; [batch, …]."""
    is_causal: bool = True
    """Whether the model shifts labels, so that each sample's first label predicts nothing."""
    counted: int | None = None

    @property
    def num_items(self) -> int:
        """The number of labels that count: not ignored, and if causal not a sample's first. May wait for the device."""
        if self.counted is not None:
            return self.counted
        labels = self.labels[:, 1:] if self.is_causal else self.labels
        return int((labels != IGNORED_LABEL).sum())

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, each once: often the tokens are the labels."""
        every = (self.input_ids, self.labels, *self.others.values())
        return tuple({id(tensor): tensor for tensor in every}.values())

    def part(self, index: int, count: int) -> Batch:
        """Return one of `count` equal parts of the tokens of each sample, with their positions.

        Labels have one column more: the next part's first, which this part's last token predicts. Raises ConfigError
        unless tokens attend to all those before them.
        """
        length = self.input_ids.shape[1] // count
        part = slice(index * length, (index + 1) * length)
        self._require_whole_contexts()
        labels = functional.pad(self.labels, (0, 1), value=IGNORED_LABEL)
        positions = torch.arange(part.start, part.stop).expand(len(self.input_ids), -1)
        return Batch(
            input_ids=self.input_ids[:, part],
            labels=labels[:, part.start : part.stop + 1],
            others={"position_ids": positions},
        )

    def _require_whole_contexts(self) -> None:
        for name, values in self.others.items():
            is_usual = name == "position_ids" and bool((values == torch.arange(values.shape[-1])).all())
            if name == "attention_mask" and values.ndim == 2:
                # Without the mask, padding at the end changes nothing but outputs that no loss depends on.
                counts = (self.labels != IGNORED_LABEL) & (values == 0)
                is_usual = not bool(counts.any()) and bool((values.diff(dim=1) <= 0).all())
            if not is_usual:
                raise ConfigError(
                    f"context_parallel: samples with {name} cannot be shared by devices, unless it says that each is "
                    "one document, with padding at its end alone; leave the column out, or context_parallel"
                )

    def to(self, device: torch.device) -> Batch:
        there = {id(tensor): tensor.to(device, non_blocking=True) for tensor in self.tensors}
        return self.mapped(lambda tensor: there[id(tensor)])

    def mapped(self, place: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return a batch of other tensors with the same values, on a device."""
        return Batch(
            input_ids=place(self.input_ids),
            labels=place(self.labels),
            others={name: place(tensor) for name, tensor in self.others.items()},
            is_causal=self.is_causal,
            # Counted before the copy: on a GPU, counting would wait for everything launched so far.
            counted=self.num_items,
        )


def _nothing() -> torch.Tensor:
    return torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatch(Batch):
    """What a collator has made of some samples, for a model that is kept whole: it has no tokens of its own.

    The share of a microbatch in the loss of a step is the model's loss times `weight` divided by the step's divisor,
    or, without `divides_by`, the loss that the model itself divides by it.
    """

    input_ids: torch.Tensor = field(default_factory=_nothing)
    labels: torch.Tensor = field(default_factory=_nothing)
    inputs: Mapping[str, Any]
    """Tensors, and containers of them, keyed by the names of arguments."""
    weight: float
    """0 where no sample counts."""
    divides_by: int | None
    """The number of items that the loss is divided by."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        found: dict[int, torch.Tensor] = {}
        mapped_tensors(self.inputs, lambda tensor: found.setdefault(id(tensor), tensor))
        return tuple(found.values())

    def mapped(self, place: Callable[[torch.Tensor], torch.Tensor]) -> WholeBatch:
        """Return a batch of other tensors with the same values, on a device."""
        return replace(self, inputs=mapped_tensors(self.inputs, place))


def mapped_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return containers with each tensor in them changed; a mapping becomes a dict."""
    match value:
        case torch.Tensor():
            return change(value)
        case Mapping():
            return {name: mapped_tensors(each, change) for name, each in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(mapped_tensors(each, change) for each in value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    seed: int
    probability: float
    mask_id: int
    vocab_size: int
    """The number of tokens from which random replacements are drawn."""

    def num_masked(self, sequence_length: int) -> int:
        """Return the number of predicted tokens in each sample."""
        return max(1, round(self.probability * sequence_length))

    def masked(
        self, samples: torch.Tensor, indices: Sequence[int], step: int, *, eligible: torch.Tensor | None = None
    ) -> Batch:
        """Mask samples [batch, length] with the numbers `indices` for a step, choosing among `eligible` tokens only."""
        inputs, labels = samples.clone(), torch.full_like(samples, IGNORED_LABEL)
        for row, index in enumerate(indices):
            tokens = torch.arange(samples.shape[1]) if eligible is None else eligible[row].nonzero()[:, 0]
            count = min(len(tokens), self.num_masked(len(tokens)))
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "mask", step, index))
            chosen = tokens[torch.randperm(len(tokens), generator=generator)[:count]]
            fate = torch.rand(count, generator=generator)
            others = torch.randint(0, self.vocab_size, (count,), generator=generator)
            labels[row, chosen] = samples[row, chosen]
            # 80 % of the chosen tokens become the mask token, 10 % another token, and 10 % stay.
            stays = torch.where(fate < 0.9, others, samples[row, chosen])
            inputs[row, chosen] = torch.where(fate < 0.8, torch.full_like(others, self.mask_id), stays)
        return Batch(input_ids=inputs, labels=labels, is_causal=False)
