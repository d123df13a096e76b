"""The data to train on: samples by index, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from oobleck.job import DataSpec

from .batches import Batch
from .corpus import Corpus, prepare_corpus

__all__ = ["Batch", "Dataset", "prepare_dataset"]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples by index. Equal digests mean equal samples."""

    corpus: Corpus

    @property
    def digest(self) -> str:
        return self.corpus.digest

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer; less than was asked for if the text is short."""
        return self.corpus.vocab_size

    @property
    def num_samples(self) -> int:
        return int(self.corpus.samples.shape[0])

    @property
    def sequence_length(self) -> int:
        return int(self.corpus.samples.shape[1])

    @property
    def items_per_sample(self) -> int:
        """Tokens of a sample that are predicted: all but the first."""
        return self.sequence_length - 1

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return samples side by side, in the order of `indices`, on the CPU."""
        input_ids = torch.from_numpy(self.corpus.samples[np.asarray(indices, dtype=np.int64)].astype(np.int64))
        return Batch(input_ids=input_ids, labels=input_ids)


def prepare_dataset(data: DataSpec, *, cache_dir: Path) -> Dataset:
    """Return the dataset that `data` describes: see `prepare_corpus`."""
    return Dataset(prepare_corpus(data, cache_dir=cache_dir))
