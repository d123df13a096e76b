"""Samples that a collator puts side by side, a microbatch at a time: those of a transformers `Trainer`.

What it returns is taken as samples that have been padded to one length, and padded further to the length of all
microbatches. It may draw random numbers: these follow from the seed, the step and the samples, so that every worker
that reads a microbatch reads the same.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from oobleck.errors import ConfigError
from oobleck.training.randomness import derive_seed, drawing_from

from .batches import IGNORED_LABEL, Batch
from .records import NO_SAMPLE
from .samples import ModelInputs, Sample, read_sample, side_by_side
from .script_data import numbers_in

__all__ = ["Collate", "CollatedSamples"]

Collate = Callable[[list[Any]], Mapping[str, Any]]
"""From samples to named arrays, [samples, …]."""

_LABELS = ("labels", "label_ids")
_DIGESTED_SAMPLES, _CHECKED_SAMPLES = 64, 8


class CollatedSamples:
    """A source of microbatches. Raises ConfigError for samples that cannot be read."""

    mask_id = None

    def __init__(
        self, samples: Any, collate: Collate, *, sequence_length: int, vocab_size: int, seed: int, place: str
    ) -> None:
        """`samples` has a length, and is asked for samples by number; `place` is where they are from, for messages."""
        self._samples = samples
        self._collate = collate
        self._seed = seed
        self._place = place
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.num_samples = len(samples)
        if not self.num_samples:
            raise ConfigError(f"{place}: it has no samples")
        self.digest = self._digest_some()

    def batch(self, numbers: Sequence[int], inputs: ModelInputs, *, step: int) -> Batch:
        """Return samples side by side; those without a number stand last, and nothing of them counts.

        Raises ConfigError where they do not fit the model.
        """
        there = [number for number in numbers if number != NO_SAMPLE]
        rows = self._rows(there or [0], inputs, step)
        shape = () if inputs.task == "sequence_classification" else rows[0].tokens.shape
        nothing = replace(rows[0], labels=np.full(shape, IGNORED_LABEL))
        rows = [*rows[: len(there)], *[nothing] * (len(numbers) - len(there))]
        with self._blaming(there):
            return side_by_side(rows, inputs, length=self.sequence_length)

    def check(self, inputs: ModelInputs) -> None:
        """Look at some samples. Raises ConfigError where one does not fit the model."""
        for number in self._some(_CHECKED_SAMPLES):
            self.batch([number], inputs, step=0)

    def _rows(self, numbers: Sequence[int], inputs: ModelInputs, step: int) -> list[Sample]:
        with self._blaming(numbers), _drawing_alike(derive_seed(self._seed, "collated", step, numbers[0])):
            columns = dict(self._collate([self._samples[number] for number in numbers]))
            rows = [{name: np.asarray(values[row]) for name, values in columns.items()} for row in range(len(numbers))]
            lengths = {name: len(values) for name, values in columns.items() if len(values) != len(numbers)}
            if lengths:
                raise ConfigError(
                    f"data_collator makes {lengths} rows of {len(numbers)} samples; it must keep one row for each "
                    "sample: pack the dataset itself, with position_ids that begin again at each document"
                )
            if not columns.keys() & set(_LABELS):
                raise ConfigError("data_collator returns no labels, so the model would return no loss")
            read = (self.sequence_length, self.vocab_size)
            return [read_sample(row, inputs, length=read[0], vocab_size=read[1]) for row in rows]

    @contextmanager
    def _blaming(self, numbers: Sequence[int]) -> Iterator[None]:
        """Name the samples in whatever goes wrong with them."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self._place}: samples {list(numbers)}: {error}") from error
        # It is somebody else's code, and may fail in any way.
        except Exception as error:
            raise ConfigError(f"{self._place}: samples {list(numbers)}: {type(error).__name__}: {error}") from error

    def _some(self, count: int) -> list[int]:
        """Samples from all over."""
        numbers = np.linspace(0, self.num_samples - 1, min(self.num_samples, count))
        return [int(number) for number in numbers]

    def _digest_some(self) -> str:
        digest = hashlib.blake2b(f"{self.num_samples}".encode(), digest_size=16)
        for number in self._some(_DIGESTED_SAMPLES):
            with self._blaming([number]), _drawing_alike(0):
                digest.update(numbers_in(self._samples[number]))
        return digest.hexdigest()


@contextmanager
def _drawing_alike(seed: int) -> Iterator[None]:
    """Within the block, whatever draws random numbers draws those of a seed."""
    kept, of_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with drawing_from(seed):
            yield
    finally:
        random.setstate(kept)
        np.random.set_state(of_numpy)
