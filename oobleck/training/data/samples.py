"""Samples as named arrays: checked against the model's inputs, padded, and put side by side.

A sample has tokens, labels, and further arguments of the model's forward. No column is dropped: one that the model
does not take is an error, unless it only states the default.

Padding is at the end, with ignored labels. An attention mask hides it from the other tokens, or positions do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oobleck.errors import ConfigError
from oobleck.job import LossCounting, Task

from .batches import IGNORED_LABEL, Batch
from .columns import states_default

Array = npt.NDArray[Any]

_TOKENS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"
LABELS = ("labels", "label_ids")
_LABEL = "label"  # the name in datasets for classification, which transformers' collators rename too


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeInputs:
    """How the loss of a whole model is counted over the microbatches of a step."""

    counting: LossCounting
    count: Callable[[Mapping[str, Any]], int | None]
    """Returns how many labels of a collated batch count, None if it has none."""
    averages: bool
    """Whether the script's loss of a step is the mean of its batches' losses, not their sum."""

    @property
    def counts_labels(self) -> bool:
        return self.counting in ("items", "labels")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What a model takes of a sample, and what it predicts."""

    task: Task = "causal_lm"
    names: frozenset[str] = frozenset()
    """Arguments of its forward besides tokens and labels."""
    pad_id: int | None = 0
    """The padding token; None if the model has to recognise padding, but has no token for it."""
    num_labels: int | None = None
    """The number of classes, for classification."""
    counts_first: bool = False
    """Whether each sample's first label counts in causal language modelling too: the model does not shift labels."""
    separates_documents: Callable[[], bool] = lambda: False
    """Returns whether the model keeps documents apart where positions restart in a sample. May take a second."""
    whole: WholeInputs | None = None
    """Set for a model that is kept whole, which takes what the collator makes."""

    @property
    def is_classified(self) -> bool:
        return self.num_labels is not None

    @property
    def shifts_labels(self) -> bool:
        return self.task == "causal_lm" and not self.counts_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    tokens: Array
    labels: Array | None = None
    """One for each token, or one for the sample; None if its tokens, or some of them, are predicted."""
    others: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


def read_sample(item: Any, inputs: ModelInputs, *, length: int, vocab_size: int) -> Sample:
    """Return an item of a dataset as a sample; it is a row of tokens, or a mapping with such a row as `input_ids`.

    Raises KeyError without tokens, or ConfigError for an item that does not fit the model; the caller knows which.
    """
    columns = dict(item) if isinstance(item, Mapping) else {_TOKENS: item}
    tokens = np.asarray(columns.pop(_TOKENS))
    _check_tokens(tokens, length=length, vocab_size=vocab_size)
    labels: Array | None = None
    others: dict[str, Array] = {}
    for name, value in columns.items():
        if value is None:
            continue
        values = np.asarray(value)
        if name in LABELS or (name == _LABEL and inputs.is_classified):
            if labels is not None:
                raise ConfigError(f"its column {name!r} is not the only one with labels; leave the others out")
            labels = _checked_labels(name, values, tokens, inputs, vocab_size=vocab_size)
        elif name in inputs.names:
            others[name] = _checked(name, values, is_short=len(tokens) < length)
        elif not states_default(name, tokens, values):
            known = ", ".join(sorted(inputs.names)) or "nothing else"
            raise ConfigError(
                f"its column {name!r} is used by nothing: besides {_TOKENS} and labels the model takes {known}; "
                "leave the column out"
            )
    if inputs.is_classified and labels is None:
        raise ConfigError("it has no labels, which classification needs")
    sample = Sample(tokens=tokens.astype(np.int64), labels=labels, others=others)
    _check_documents(sample.others.get(_POSITIONS), sample.others.get(_MASK), inputs)
    return sample


def side_by_side(samples: Sequence[Sample], inputs: ModelInputs, *, length: int) -> Batch:
    """Return samples as one batch, [samples, length], padded if shorter. Raises ConfigError if they do not combine."""
    names = {name for sample in samples for name in sample.others}
    if any(len(sample) < length for sample in samples):
        names |= _hides_padding(names, inputs)
    columns = {name: [_filled(name, sample) for sample in samples] for name in sorted(names)}
    if _MASK in names and _POSITIONS in names:
        for positions, mask in zip(columns[_POSITIONS], columns[_MASK], strict=True):
            _check_documents(positions, mask, inputs)
    others = {name: _stacked(name, rows, samples, length) for name, rows in columns.items()}
    if _MASK in others and others[_MASK].ndim == 2 and bool((others[_MASK] == 1).all()):
        # It hides nothing, and without it the model may take a faster path.
        del others[_MASK]
    return Batch(
        input_ids=torch.from_numpy(np.stack([_padded(s.tokens, length, inputs.pad_id or 0) for s in samples])),
        labels=_labels_of(samples, length),
        others=others,
        is_causal=inputs.shifts_labels,
    )


def ignored(sample: Sample, inputs: ModelInputs) -> Sample:
    """Return a filler: a sample none of whose labels counts."""
    shape = () if inputs.task == "sequence_classification" else sample.tokens.shape
    return replace(sample, labels=np.full(shape, IGNORED_LABEL))


def _check_tokens(tokens: Array, *, length: int, vocab_size: int) -> None:
    if tokens.ndim != 1 or not 1 <= len(tokens) <= length or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"it is {tokens.dtype} of the shape {tokens.shape}; it must be whole numbers, data.sequence_length = "
            f"{length} of them at most"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ConfigError(f"it has the token {wrong}, and data.vocab_size is {vocab_size}; raise it")


def _checked_labels(name: str, values: Array, tokens: Array, inputs: ModelInputs, *, vocab_size: int) -> Array:
    shape = () if inputs.task == "sequence_classification" else tokens.shape
    if values.shape != shape or values.dtype.kind not in "iub":
        wanted = "one whole number" if shape == () else "a whole number for each token"
        raise ConfigError(f"its column {name!r} is {values.dtype} of the shape {values.shape}; it must be {wanted}")
    limit = vocab_size if inputs.num_labels is None else inputs.num_labels
    wrong = values[(values != IGNORED_LABEL) & ((values < 0) | (values >= limit))]
    if wrong.size:
        what = "data.vocab_size" if inputs.num_labels is None else "model.config.num_labels"
        raise ConfigError(f"its column {name!r} has the label {wrong.flat[0]}, and {what} is {limit}")
    return values.astype(np.int64)


def _checked(name: str, values: Array, *, is_short: bool) -> Array:
    if values.dtype.kind not in "iubf":
        raise ConfigError(f"its column {name!r} is {values.dtype}; the model takes numbers")
    if name == _MASK and values.ndim > 1 and is_short:
        raise ConfigError(f"its {_MASK} has the shape {values.shape}; with it, give data.sequence_length tokens")
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    return values.astype(np.int64) if values.ndim < 2 else values


def _check_documents(positions: Array | None, mask: Array | None, inputs: ModelInputs) -> None:
    """Raise ConfigError if the documents of a sample would attend to each other."""
    if positions is None or positions.ndim != 1 or (mask is not None and mask.ndim > 1):
        # A mask of two or more dimensions itself defines which tokens attend to which.
        return
    if mask is not None and mask.shape == positions.shape:
        positions = positions[mask != 0]
    if not len(_starts(positions)):
        return
    if mask is not None:
        raise ConfigError(
            f"its {_POSITIONS} begin again, for several documents, and with an {_MASK} the documents would see each "
            f"other; leave the {_MASK} out (padding is hidden without it)"
        )
    if not inputs.separates_documents():
        raise ConfigError(
            f"its {_POSITIONS} begin again, for several documents, and this model would not keep them apart; give it "
            "one document a sample"
        )


def _hides_padding(names: set[str], inputs: ModelInputs) -> set[str]:
    """Return the further columns that hide padding."""
    if inputs.pad_id is None:
        raise ConfigError("a sample is shorter than data.sequence_length; set model.config.pad_token_id to pad it")
    # Where positions divide a sample into documents, padding is a document of its own.
    if _POSITIONS in names and _MASK not in names and inputs.separates_documents():
        return set()
    if _MASK not in inputs.names:
        raise ConfigError(
            f"a sample is shorter than data.sequence_length, and the model takes no {_MASK} that could hide padding; "
            "make all samples as long"
        )
    return {_MASK}


def _starts(positions: Array) -> Array:
    """Return where all documents but the first begin, by the same rule as transformers."""
    return np.flatnonzero(np.diff(positions) != 1) + 1


def _filled(name: str, sample: Sample) -> Array:
    """Return a sample's column, or the default values of one that it does not have."""
    if name in sample.others:
        return sample.others[name]
    match name:
        case "attention_mask":
            return np.ones(len(sample), dtype=np.int64)
        case "position_ids":
            return np.arange(len(sample))
        case "token_type_ids":
            return np.zeros(len(sample), dtype=np.int64)
        case _:
            raise ConfigError(f"a sample has no column {name!r}, and others have")


def _stacked(name: str, rows: Sequence[Array], samples: Sequence[Sample], length: int) -> torch.Tensor:
    padded = [_padded_column(name, row, sample, length) for row, sample in zip(rows, samples, strict=True)]
    if len({row.shape for row in padded}) > 1:
        raise ConfigError(f"column {name!r} has different shapes: {sorted({row.shape for row in padded})}")
    return torch.from_numpy(np.stack(padded))


def _padded_column(name: str, row: Array, sample: Sample, length: int) -> Array:
    if row.shape[:1] != (len(sample),):
        return row
    if name == _POSITIONS and row.ndim == 1:
        return np.concatenate([row, np.arange(length - len(row))])
    return _padded(row, length, 0)


def _padded(row: Array, length: int, value: int) -> Array:
    missing = length - len(row)
    return row if not missing else np.concatenate([row, np.full((missing, *row.shape[1:]), value, dtype=row.dtype)])


def _labels_of(samples: Sequence[Sample], length: int) -> torch.Tensor:
    rows = [_predicted(sample) if sample.labels is None else sample.labels for sample in samples]
    if rows[0].ndim == 0:
        return torch.from_numpy(np.stack(rows))
    return torch.from_numpy(np.stack([_padded(row, length, IGNORED_LABEL) for row in rows]))


def _predicted(sample: Sample) -> Array:
    """Return default labels: the tokens, without padding and each document's first, which nothing predicts."""
    labels = sample.tokens.copy()
    mask, positions = sample.others.get(_MASK), sample.others.get(_POSITIONS)
    if mask is not None and mask.shape == labels.shape:
        labels[mask == 0] = IGNORED_LABEL
    if positions is not None and positions.shape == labels.shape:
        labels[_starts(positions)] = IGNORED_LABEL
    return labels
