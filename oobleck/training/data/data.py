"""The data to train on: samples by index, as tensors.

Some samples may be held out for evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from oobleck.errors import ConfigError
from oobleck.job import DataSpec

from .batches import IGNORED_LABEL, Batch, Masking
from .corpus import Corpus, prepare_corpus
from .records import NO_SAMPLE, Records
from .samples import ModelInputs, Sample, WholeInputs, side_by_side
from .sampling import permuted, samples_of_step
from .script_data import CollatedSamples, PlaceInStep, ScriptSamples
from .script_stream import ScriptStream
from .shard_readers import ShardSet, ShardSource
from .text import open_table
from .token_files import TokenFiles, holds_tokens
from .tuning_rows import TuningRows

# An epoch that no training has. Its permutation chooses the samples for evaluation.
_SPLIT = -1

Source = Corpus | TokenFiles | ShardSource
"""A source of samples that are rows of tokens."""


class StepOrder(Protocol):
    """An order of samples that does not follow from their numbers. Steps count from 1, epochs from 0."""

    def __call__(self, step: int) -> Sequence[int]:
        """Return the numbers of a step's samples, in order; the last step of an epoch may have fewer."""

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return a step's epoch, and the step's number in it, from 0."""

    def first_step(self, epoch: int) -> int:
        """Return the first step of an epoch."""

    def digest(self, epoch: int) -> str:
        """Digest the order of an epoch's samples."""

    def batches(self, step: int) -> Sequence[Sequence[int]]:
        """Return the numbers of a step's samples in batches, as the script by itself reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationBatches:
    """The batches in which a script by itself evaluates: its loss is the mean of theirs, weighed by their samples."""

    batches: Sequence[Sequence[int]]
    leaves_out_nan: bool = True
    """Whether batches whose loss is no number do not count, as long as there are others."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples by index: all of a source, or one side of its split."""

    source: Source | ScriptSamples | ScriptStream | TuningRows | CollatedSamples
    masking: Masking | None = None
    inputs: ModelInputs = field(default_factory=ModelInputs)
    part: range | None = None
    """Positions in the split's permutation of the source's samples; None means all samples in their own order."""
    order: StepOrder | None = None
    """The samples of each step; None means those of `samples_of_step`."""
    evaluated: EvaluationBatches | None = None
    """How it is evaluated; None means by the mean over all predicted tokens."""

    @property
    def digest(self) -> str:
        return self.source.digest

    @property
    def vocab_size(self) -> int:
        """The number of tokens, with a mask token; fewer than the job asks for if a short text yields fewer."""
        size = self.source.vocab_size
        return size + (self.masking is not None and self.masking.mask_id == size)

    @property
    def records(self) -> Records | None:
        """The table of each step's samples; None if they follow from their numbers."""
        return self.source.records if isinstance(self.source, ShardSource | ScriptStream) else None

    @property
    def shards(self) -> ShardSet | ScriptStream | None:
        """The shards of `records`, for another thread to survey."""
        return self.source.reopened() if isinstance(self.source, ShardSource | ScriptStream) else None

    @property
    def num_samples(self) -> int:
        return self.source.num_samples if self.part is None else len(self.part)

    @property
    def sequence_length(self) -> int:
        return self.source.sequence_length

    @property
    def items_per_sample(self) -> int:
        """The number of predicted tokens in a sample, as far as it is known beforehand."""
        if self.masking is not None:
            return self.masking.num_masked(self.sequence_length)
        if self.inputs.whole is not None:
            return self.sequence_length if self.inputs.whole.counts_labels else 1
        match self.inputs.task:
            case "sequence_classification":
                return 1
            case "causal_lm":
                return self.sequence_length - 1
            case _:
                return self.sequence_length

    @property
    def runs_script(self) -> bool:
        """Whether reading samples runs a script's code, which may draw random numbers."""
        if isinstance(self.source, ShardSource):
            return self.source.runs_script
        return isinstance(self.source, ScriptSamples | ScriptStream | CollatedSamples)

    @property
    def fills_up(self) -> bool:
        """Whether a batch may contain `NO_SAMPLE`."""
        return isinstance(self.source, CollatedSamples)

    def samples_of_step(self, seed: int, step: int, batch: int) -> tuple[int, ...]:
        """Return the numbers of a step's samples, filled up to `batch` with `NO_SAMPLE`. Steps count from 1."""
        if self.order is None:
            return samples_of_step(seed, step, batch, self.num_samples)
        numbers = tuple(self.order(step))
        return (*numbers, *[NO_SAMPLE] * (batch - len(numbers)))

    def largest_batch(self, size: int) -> Batch:
        """Return a batch of samples that take much memory, for a whole model to be measured with."""
        assert isinstance(self.source, CollatedSamples)
        numbers = self.source.largest(size)
        return self.batch([numbers[place % len(numbers)] for place in range(size)], step=1)

    def divisor_of(self, step: int, numbers: Sequence[int]) -> int:
        """Return the divisor of the losses of a step with these samples, before its predicted tokens are counted."""
        whole = self.inputs.whole
        if whole is None or self.order is None:
            return len(numbers) * self.items_per_sample
        return self._divisor(len(numbers), len(self.order.batches(step)), whole)

    def divisor_of_batch(self, num_samples: int) -> int:
        """Return the divisor of the losses of a batch that is evaluated, before its predicted tokens are counted."""
        whole = self.inputs.whole
        return num_samples * self.items_per_sample if whole is None else self._divisor(num_samples, 1, whole)

    def _divisor(self, num_samples: int, num_batches: int, whole: WholeInputs) -> int:
        if whole.counting == "items" or (whole.counting == "labels" and num_batches == 1):
            return num_samples * self.items_per_sample
        return num_batches if whole.averages else 1

    @property
    def counts_items(self) -> bool:
        """Whether a batch without predicted tokens has no loss."""
        return self.inputs.whole is None or self.inputs.whole.counts_labels

    def batch(
        self, indices: Sequence[int], *, step: int = 0, first: int | None = None, within: Sequence[int] | None = None
    ) -> Batch:
        """Return samples side by side in the order of `indices`, on the CPU, and masked for a step if required.

        `first` is the position of the first of them in the step, or in the batch `within` that is evaluated; None if
        they are neither trained on nor evaluated.
        """
        numbers = list(indices)
        if self.part is not None:
            # Not with the job's seed, so that the split is the same for every seed, and in a run that resumes another.
            numbers = permuted(0, _SPLIT, [self.part[index] for index in numbers], self.source.num_samples)
        if isinstance(self.source, CollatedSamples):
            return self.source.batch(numbers, self.inputs, step=step, place=self._place(step, first, within))
        if isinstance(self.source, ScriptSamples):
            samples = [self.source.sample(number, self.inputs, step=step) for number in numbers]
            return self._side_by_side(samples, numbers, step)
        if isinstance(self.source, ScriptStream | TuningRows):
            return self._side_by_side([self.source.sample(number, self.inputs) for number in numbers], numbers, step)
        input_ids = torch.from_numpy(self.source.rows(numbers))
        # Fillers are negative: a record may be shorter than a sample, or missing.
        if (is_filler := input_ids < 0).any():
            labels = input_ids.masked_fill(is_filler, IGNORED_LABEL)
            tokens = input_ids.masked_fill(is_filler, 0)
            return Batch(input_ids=tokens, labels=labels, is_causal=self.inputs.shifts_labels)
        if self.masking is not None:
            return self.masking.masked(input_ids, numbers, step)
        return Batch(input_ids=input_ids, labels=input_ids, is_causal=self.inputs.shifts_labels)

    def _place(self, step: int, first: int | None, within: Sequence[int] | None) -> PlaceInStep | None:
        if self.inputs.whole is None or first is None:
            return None
        if within is not None:
            return PlaceInStep([within], first)
        return None if self.order is None else PlaceInStep(self.order.batches(step), first)

    def _side_by_side(self, samples: Sequence[Sample], numbers: Sequence[int], step: int) -> Batch:
        try:
            batch = side_by_side(samples, self.inputs, length=self.sequence_length)
        except ConfigError as error:
            raise ConfigError(f"the samples {list(numbers)}: {error}") from error
        have_labels = {sample.labels is not None for sample in samples}
        if self.masking is None or have_labels == {True}:
            return batch
        if have_labels != {False}:
            raise ConfigError("the script's data: some samples have labels, and some have none to be masked for")
        eligible = batch.labels != IGNORED_LABEL
        return replace(self.masking.masked(batch.input_ids, numbers, step, eligible=eligible), others=batch.others)

    def with_inputs(self, inputs: ModelInputs) -> Dataset:
        """Return the dataset for a model. Raises ConfigError if samples do not fit it."""
        if isinstance(self.source, ScriptSamples | ScriptStream | TuningRows | CollatedSamples):
            self.source.check(inputs)
        elif inputs.is_classified:
            raise ConfigError(
                "model.task: text has no labels to predict; set data.format to labels, or have a script's `data` "
                "return samples"
            )
        return replace(self, inputs=inputs)

    def with_masking(self, *, probability: float, seed: int) -> Dataset:
        """Return the dataset for a masked language model. A source without a mask token gets an additional token."""
        size, mask_id = self.source.vocab_size, self.source.mask_id
        masking = Masking(
            seed=seed, probability=probability, mask_id=size if mask_id is None else mask_id, vocab_size=size
        )
        return replace(self, masking=masking)

    def split(self, share: float) -> tuple[Dataset, Dataset | None]:
        """Return the samples to train on, and the held-out ones, if any. Raises ConfigError if there are too few."""
        if not share:
            return self, None
        total = self.source.num_samples
        kept = max(1, int(share * total))
        if kept >= total:
            raise ConfigError(
                f"data.validation_split: {share} of {total} samples leaves none to train on; give more data"
            )
        return replace(self, part=range(kept, total)), replace(self, part=range(kept))


def prepare_dataset(data: DataSpec, *, cache_dir: Path) -> Dataset:
    """Return all samples that `data` describes. Blocks and raises as `open_source`."""
    return Dataset(open_source(data, cache_dir=cache_dir))


def open_source(data: DataSpec, *, cache_dir: Path) -> Source | ScriptSamples | TuningRows:
    """Map files of tokens, read samples or rows to fine-tune on, or tokenise text unless `cache_dir` has it. Blocks.

    Raises ConfigError for data that cannot be read or is too short, and ResourceLost as `prepare_corpus`.
    """
    if data.shards:
        return ShardSource(data)
    if data.format == "samples":
        table = open_table(data)
        return ScriptSamples(
            lambda: table,
            place=data.dataset_path or "data.paths",
            sequence_length=data.sequence_length,
            vocab_size=data.vocab_size,
        )
    if data.format != "text":
        return TuningRows(data)
    if holds_tokens(data):
        return TokenFiles(data)
    return prepare_corpus(data, cache_dir=cache_dir)
