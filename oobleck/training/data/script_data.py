"""Samples of a script or a dataset: any sequence whose items are tokens, or mappings.

A transformers `Trainer` has a collator that puts them side by side, a microbatch at a time. Its rows are treated as
samples padded to one length, and are padded further to the length of all microbatches.

A dataset or a collator may draw random numbers. These follow from the seed, the step and the samples, so that all
workers that read a microbatch read the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from oobleck.errors import ConfigError
from oobleck.training.counters import counter_of
from oobleck.training.randomness import derive_seed, drawing_alike

from . import samples as reading
from .batches import Batch, WholeBatch
from .records import NO_SAMPLE
from .samples import LABELS, ModelInputs, Sample, WholeInputs, read_sample, side_by_side

Collate = Callable[[list[Any]], Mapping[str, Any]]
"""Turns samples into named arrays, [samples, …]."""

ASKED_AGAIN = (
    "each worker reads the samples of its own microbatches, and reads some again after a failure; leave out what "
    "depends on earlier calls (a count, a memory), and draw random numbers from random, numpy or torch itself, which "
    "are seeded for each microbatch"
)
_DIGESTED_SAMPLES, _CHECKED_SAMPLES = 64, 8


class ScriptSamples:
    """A source of samples: a list, an array, a torch dataset. An item is a row of tokens, or a mapping with such a row
    as `input_ids`, and labels, masks and other inputs of the model.
    """

    mask_id = None

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        sequence_length: int,
        vocab_size: int,
        seed: int = 0,
        place: str = "the script's data",
    ) -> None:
        """`place` names the source in messages. Raises ConfigError for a source without a length or samples."""
        self._place = place
        self._seed = seed
        with blaming(place):
            self._samples = make()
            if not hasattr(self._samples, "__len__"):
                raise ConfigError("it has no length; say streaming=True, and it is read one after the other")
            self.num_samples = len(self._samples)
            if not self.num_samples:
                raise ConfigError("it has no samples")
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.digest = self._digest_some()

    def sample(self, index: int, inputs: ModelInputs, *, step: int = 0) -> Sample:
        """Return a sample by index, as drawn for a step. Raises ConfigError if it does not fit the model."""
        place = f"{self._place}: sample {index}"
        with blaming(place), drawing_alike(self._seed_of(index, step)):
            item = self._samples[index]
        return read_item(item, inputs, place=place, length=self.sequence_length, vocab_size=self.vocab_size)

    def check(self, inputs: ModelInputs) -> None:
        """Read some samples. Raises ConfigError if one does not fit the model, or differs when read again."""
        if self._digest_some() != self.digest:
            raise ConfigError(f"{self._place}: some samples are others when they are read again, and {ASKED_AGAIN}")
        if (
            counter := counter_of({"the dataset": self._samples}, lambda: self._digest_some() == self.digest)
        ) is not None:
            raise ConfigError(
                f"{self._place}: some samples are others later, by {counter}, which changes whenever they are read, "
                f"and {ASKED_AGAIN}"
            )
        for index in from_all_over(self.num_samples, _DIGESTED_SAMPLES):
            sample = self.sample(index, inputs)
            check_alone(sample, inputs, place=f"{self._place}: sample {index}", length=self.sequence_length)

    def _seed_of(self, index: int, step: int = 0) -> int:
        return derive_seed(self._seed, "sample", step, index)

    def _digest_some(self) -> str:
        return _digest_of(self.num_samples, self._numbers_of, place=self._place)

    def _numbers_of(self, index: int) -> bytes:
        with drawing_alike(self._seed_of(index)):
            return numbers_in(self._samples[index])


@dataclass(frozen=True, slots=True)
class PlaceInStep:
    """Where a microbatch is among the samples of a step."""

    batches: Sequence[Sequence[int]]
    """The samples of the step, in the batches that the script by itself reads."""
    first: int
    """The position of the microbatch's first sample."""

    @property
    def own_batch(self) -> Sequence[int]:
        """The batch that the microbatch is a part of."""
        stop = 0
        for batch in self.batches:
            stop += len(batch)
            if self.first < stop:
                return batch
        raise AssertionError(f"no sample is at {self.first}")


class CollatedSamples:
    mask_id = None

    def __init__(
        self, samples: Any, collate: Collate, *, sequence_length: int, vocab_size: int, seed: int, place: str
    ) -> None:
        """`samples` is a sequence; `place` names it in messages. Raises ConfigError for unreadable samples."""
        self._samples = samples
        self._collate = collate
        self._seed = seed
        self._place = place
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.num_samples = len(samples)
        if not self.num_samples:
            raise ConfigError(f"{place}: it has no samples")
        self.digest = _digest_of(self.num_samples, self._numbers_of, place=place)
        self._counted: tuple[object, int] = (None, 0)
        """The batches whose labels were counted last, and how many there are."""

    def batch(
        self, numbers: Sequence[int], inputs: ModelInputs, *, step: int, place: PlaceInStep | None = None
    ) -> Batch:
        """Return samples side by side, fillers for `NO_SAMPLE` last. Raises ConfigError if one does not fit.

        For whole models there are no fillers, and training needs the `place` of the samples.
        """
        real = [number for number in numbers if number != NO_SAMPLE]
        if inputs.whole is not None:
            return self._whole_batch(real, inputs.whole, step, place)
        # A microbatch without samples still needs a row to fill it with.
        rows = self._rows(real or [0], inputs, step)
        rows = [*rows[: len(real)], *[reading.ignored(rows[0], inputs)] * (len(numbers) - len(real))]
        with blaming(self._place_of(real)):
            return side_by_side(rows, inputs, length=self.sequence_length)

    def _whole_batch(
        self, numbers: Sequence[int], whole: WholeInputs, step: int, place: PlaceInStep | None
    ) -> WholeBatch:
        if not numbers:
            return WholeBatch(inputs={}, weight=0.0, divides_by=1, counted=0)
        inputs = self.collated(numbers, step=step)
        num_rows, num_items = len(numbers), whole.count(inputs) or 0
        batch = partial(WholeBatch, inputs=inputs)
        if whole.counting == "items":
            return batch(weight=num_items, divides_by=None, counted=num_items)
        if place is None or (whole.counting == "labels" and len(place.batches) == 1):
            # The labels of a step are known once all of it is read.
            weight = num_items if whole.counting == "labels" else num_rows
            return batch(weight=weight, divides_by=num_items or num_rows, counted=weight)
        own, share = place.own_batch, 1.0
        if whole.counting == "samples":
            share = num_rows / len(own)
        elif whole.counting == "labels":
            share = num_items / (num_items if len(own) == num_rows else self._count_items([own], whole, step) or 1)
        is_told = whole.counting == "batch" and not whole.averages and len(place.batches) > 1
        told = self._count_items(place.batches, whole, step) if is_told else num_items
        return batch(weight=share, divides_by=told or num_rows, counted=0)

    def _count_items(self, batches: Sequence[Sequence[int]], whole: WholeInputs, step: int) -> int:
        """Count the labels of batches, each of which is read as a whole."""
        key = step, *map(tuple, batches)
        if self._counted[0] != key:  # microbatches of a batch follow each other
            self._counted = key, sum(whole.count(self.collated(numbers, step=step)) or 0 for numbers in batches)
        return self._counted[1]

    def collated(self, numbers: Sequence[int], *, step: int) -> dict[str, Any]:
        """Return what the collator makes of samples in a step, arrays as tensors. Raises ConfigError if it fails."""
        with blaming(self._place_of(numbers)), self._drawing(numbers, step):
            made = self._collate(items_of(self._samples, numbers))
            return {
                name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in made.items()
            }

    def _drawing(self, numbers: Sequence[int], step: int) -> AbstractContextManager[None]:
        # All readers of a microbatch read the same samples, so the first one's number stands for all of them.
        return drawing_alike(derive_seed(self._seed, "collated", step, numbers[0]))

    def largest(self, count: int) -> list[int]:
        """Return the numbers of the largest samples, among some from all over."""
        some = from_all_over(self.num_samples, _DIGESTED_SAMPLES)
        return sorted(some, key=lambda number: (-len(self._numbers_of(number)), number))[:count]

    def check(self, inputs: ModelInputs) -> None:
        """Read some samples. Raises ConfigError if one does not fit the model."""
        for number in from_all_over(self.num_samples, _CHECKED_SAMPLES):
            self.batch([number], inputs, step=0)

    def _numbers_of(self, number: int) -> bytes:
        with drawing_alike(0):
            return numbers_in_all(items_of(self._samples, [number]))

    def _rows(self, numbers: Sequence[int], inputs: ModelInputs, step: int) -> list[Sample]:
        with blaming(self._place_of(numbers)), self._drawing(numbers, step):
            columns = dict(self._collate(items_of(self._samples, numbers)))
            lengths = {name: len(values) for name, values in columns.items() if len(values) != len(numbers)}
            if lengths:
                raise ConfigError(
                    f"data_collator makes {lengths} rows of {len(numbers)} samples; it must keep one row for each "
                    "sample: pack the dataset itself, with position_ids that begin again at each document"
                )
            if not columns.keys() & set(LABELS):
                raise ConfigError("data_collator returns no labels, so the model would return no loss")
            rows = ({name: np.asarray(values[row]) for name, values in columns.items()} for row in range(len(numbers)))
            length, vocab_size = self.sequence_length, self.vocab_size
            return [read_sample(row, inputs, length=length, vocab_size=vocab_size) for row in rows]

    def _place_of(self, numbers: Sequence[int]) -> str:
        return f"{self._place}: samples {list(numbers)}"


@contextmanager
def blaming(place: str) -> Iterator[None]:
    """Turn every error within the block into a ConfigError that begins with its place."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    # The block runs the user's code, which may fail in any way.
    except Exception as error:
        raise ConfigError(f"{place}: {type(error).__name__}: {error}") from error


def read_item(item: Any, inputs: ModelInputs, *, place: str, length: int, vocab_size: int) -> Sample:
    """Return an item of a script as a sample. Raises ConfigError, with its place, if it does not fit the model."""
    with blaming(place):
        return read_sample(item, inputs, length=length, vocab_size=vocab_size)


def check_alone(sample: Sample, inputs: ModelInputs, *, place: str, length: int) -> None:
    """Check a sample as a batch of its own. Raises ConfigError, with its place, if it does not fit the model."""
    try:
        side_by_side([sample], inputs, length=length)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def numbers_in(item: Any) -> bytes:
    """Return the numbers in an item, with their names and shapes, for a digest."""
    parts: list[bytes] = []
    for name, value in sorted(item.items()) if isinstance(item, Mapping) else [("", item)]:
        try:
            values = np.asarray(value)
        except ValueError:  # its rows have different lengths
            parts.append(f"{name}:{value}".encode())
            continue
        if values.dtype.kind in "iubf":
            parts += [f"{name}:{values.dtype.str}{values.shape}".encode(), values.tobytes()]
    return b"".join(parts)


def numbers_in_all(items: Any) -> bytes:
    """Return the numbers in what a collator receives: items, or whatever else a dataset's `__getitems__` returns."""
    return numbers_in(items) if isinstance(items, Mapping) else b"".join(map(numbers_in, items))


def items_of(samples: Any, numbers: Sequence[int]) -> Any:
    """Read samples as torch's loader does for a collator: together, where the dataset has `__getitems__`."""
    if reads_together(samples):
        return samples.__getitems__(list(numbers))
    return [samples[number] for number in numbers]


def reads_together(samples: Any) -> bool:
    """Return whether a dataset reads the samples of a batch together, as that of Hugging Face's `datasets` does."""
    return bool(getattr(samples, "__getitems__", None))


def _digest_of(num_samples: int, numbers_of: Callable[[int], bytes], *, place: str) -> str:
    """Digest the number of samples, and the numbers in some of them."""
    digest = hashlib.blake2b(f"{num_samples}".encode(), digest_size=16)
    for index in from_all_over(num_samples, _DIGESTED_SAMPLES):
        with blaming(f"{place}: sample {index}"):
            digest.update(numbers_of(index))
    return digest.hexdigest()


def from_all_over(num_samples: int, count: int) -> list[int]:
    """Return up to `count` indices, spread evenly over all samples."""
    return [int(number) for number in np.linspace(0, num_samples - 1, min(num_samples, count))]
