"""Samples of a script or a dataset: any sequence whose items are tokens, or mappings.

A transformers `Trainer` has a collator that puts them side by side, a microbatch at a time. Its rows are treated as
samples padded to one length, and are padded further to the length of all microbatches.

A dataset or a collator may draw random numbers. These follow from the seed, the step and the samples, so that all
workers that read a microbatch read the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from oobleck.errors import ConfigError
from oobleck.training.counters import counter_of
from oobleck.training.randomness import derive_seed, drawing_alike, generator_states

from .batches import IGNORED_LABEL, Batch
from .records import NO_SAMPLE
from .samples import LABELS, ModelInputs, Sample, ignored, read_sample, side_by_side

Collate = Callable[[list[Any]], Mapping[str, Any]]
"""Turns samples into named arrays, [samples, …]."""

_ASKED_AGAIN = (
    "each worker reads the samples of its own microbatches, and reads some again after a failure; leave out what "
    "depends on earlier calls (a count, a memory), and draw random numbers from random, numpy or torch itself, which "
    "are seeded for each microbatch"
)
_DIGESTED_SAMPLES, _CHECKED_SAMPLES, _TRIED_SAMPLES = 64, 8, 8


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
            raise ConfigError(f"{self._place}: some samples are others when they are read again, and {_ASKED_AGAIN}")
        if (
            counter := counter_of({"the dataset": self._samples}, lambda: self._digest_some() == self.digest)
        ) is not None:
            raise ConfigError(
                f"{self._place}: some samples are others later, by {counter}, which changes whenever they are read, "
                f"and {_ASKED_AGAIN}"
            )
        for index in _from_all_over(self.num_samples, _DIGESTED_SAMPLES):
            sample = self.sample(index, inputs)
            check_alone(sample, inputs, place=f"{self._place}: sample {index}", length=self.sequence_length)

    def _seed_of(self, index: int, step: int = 0) -> int:
        return derive_seed(self._seed, "sample", step, index)

    def _digest_some(self) -> str:
        return _digest_of(self._samples, self._seed_of, place=self._place)


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
        self.digest = _digest_of(samples, lambda _: 0, place=place)

    def batch(self, numbers: Sequence[int], inputs: ModelInputs, *, step: int) -> Batch:
        """Return samples side by side, fillers for `NO_SAMPLE` last. Raises ConfigError if one does not fit."""
        real = [number for number in numbers if number != NO_SAMPLE]
        # A microbatch without samples still needs a row to fill it with.
        rows = self._rows(real or [0], inputs, step)
        rows = [*rows[: len(real)], *[ignored(rows[0], inputs)] * (len(numbers) - len(real))]
        with blaming(self._place_of(real)):
            return side_by_side(rows, inputs, length=self.sequence_length)

    def check(self, inputs: ModelInputs) -> None:
        """Read some samples. Raises ConfigError if one does not fit the model."""
        for number in _from_all_over(self.num_samples, _CHECKED_SAMPLES):
            self.batch([number], inputs, step=0)

    def _rows(self, numbers: Sequence[int], inputs: ModelInputs, step: int) -> list[Sample]:
        # Whoever reads a microbatch reads the same samples, so the first one's number stands for all of them.
        seed = derive_seed(self._seed, "collated", step, numbers[0])
        with blaming(self._place_of(numbers)), drawing_alike(seed):
            columns = dict(self._collate([self._samples[number] for number in numbers]))
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
        values = np.asarray(value)
        if values.dtype.kind in "iubf":
            parts += [f"{name}:{values.dtype.str}{values.shape}".encode(), values.tobytes()]
    return b"".join(parts)


def _digest_of(samples: Any, seed_of: Callable[[int], int], *, place: str) -> str:
    """Digest the number of samples, and the numbers in some of them."""
    digest = hashlib.blake2b(f"{len(samples)}".encode(), digest_size=16)
    for index in _from_all_over(len(samples), _DIGESTED_SAMPLES):
        with blaming(f"{place}: sample {index}"), drawing_alike(seed_of(index)):
            digest.update(numbers_in(samples[index]))
    return digest.hexdigest()


def _from_all_over(num_samples: int, count: int) -> list[int]:
    """Return up to `count` indices, spread evenly over all samples."""
    return [int(number) for number in np.linspace(0, num_samples - 1, min(num_samples, count))]


# --- whether samples and rows are the same each time -------------------------------------------------------------


def try_collator(samples: Any, collate: Collate, *, place: str) -> None:
    """Raise ConfigError if samples or collated rows depend on earlier calls, or rows on other rows.

    `samples` is a sequence, and `place` names it. Reads a few samples a few times.
    """
    numbers = _from_all_over(len(samples), _TRIED_SAMPLES)
    # Errors of the user's code are reported where its samples are read.
    with suppress(LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError):
        if (fault := _fault_of_samples(samples, numbers)) is None:
            items = [samples[number] for number in numbers]
            fault = _fault_of_rows(items, collate) or _fault_of_later_rows(items, collate)
        if fault is not None:
            raise ConfigError(f"{place}: {fault}")


def _fault_of_samples(samples: Any, numbers: Sequence[int]) -> str | None:
    for number in numbers:
        if _read(samples, number) != _read(samples, number):
            return f"sample {number} is another one when it is read again, and {_ASKED_AGAIN}"
    first = [_read(samples, number) for number in numbers]
    counter = counter_of({"the dataset": samples}, lambda: [_read(samples, number) for number in numbers] == first)
    if counter is not None:
        return f"some samples are others later, by {counter}, which changes whenever they are read, and {_ASKED_AGAIN}"
    return None


def _read(samples: Any, number: int) -> bytes:
    with drawing_alike(number):
        return numbers_in(samples[number])


_Rows = list[dict[str, Any]]
_MIXED = (
    "data_collator makes another row of a sample when it has others next to it, and batches are cut into microbatches "
    "over nodes; have it make each row of its own sample, pad rows to the longest alone, and give padding the label "
    f"{IGNORED_LABEL}"
)


def _fault_of_rows(items: Sequence[Any], collate: Collate) -> str | None:
    # Nodes cut a batch into microbatches, so a row must not depend on which others are next to it.
    together, drawn = _collated(items, collate)
    if len(together) != len(items):
        return (
            f"data_collator makes {len(together)} rows of {len(items)} samples; it must keep one row for each sample: "
            "leave samples out, or pack them, in the dataset itself"
        )
    alone = [_collated([item], collate) for item in items]
    again, _ = _collated(items, collate)
    if not all(map(_are_equal, together, again)):
        return f"data_collator returns other rows when it is called again with the same samples, and {_ASKED_AGAIN}"
    if drawn is not None or any(has_drawn is not None for _, has_drawn in alone):
        # Rows differ by what was drawn for them, which depends on how many rows there are.
        return _fault_of_drawn_rows(items, collate)
    for row, (rows, _) in zip(together, alone, strict=True):
        if not _are_equal(row, rows[0]) and not _is_padded(row, rows[0]):
            return _MIXED
    return None


def _fault_of_drawn_rows(items: Sequence[Any], collate: Collate) -> str | None:
    """Compare a row among others with the same row among copies of itself, if both draw equally many numbers."""
    first, *others = items
    alike = [first, *(each for each in others if _form_of(each) == _form_of(first))]
    rows, drawn = _collated(alike, collate)
    copies, drawn_for_copies = _collated([first] * len(alike), collate)
    if len(alike) > 1 and drawn == _collated([first], collate)[1] is not None:
        return (
            "data_collator draws random numbers for all rows of its batch at once, and batches are cut into "
            "microbatches over nodes, each of which would draw its own; have it draw numbers for each row"
        )
    return _MIXED if drawn == drawn_for_copies and not _are_equal(rows[0], copies[0]) else None


def _form_of(item: Any) -> object:
    """Return the names and shapes of an item's values."""
    named = item.items() if isinstance(item, Mapping) else [("", item)]
    return sorted((str(name), np.shape(value)) for name, value in named)


def _fault_of_later_rows(items: Sequence[Any], collate: Collate) -> str | None:
    first, _ = _collated(items, collate)

    def same() -> bool:
        return all(map(_are_equal, _collated(items, collate)[0], first))

    counter = counter_of({"data_collator": collate}, same)
    if counter is None:
        return None
    return f"data_collator returns other rows later, by {counter}, which changes with every call, and {_ASKED_AGAIN}"


def _collated(items: Sequence[Any], collate: Collate) -> tuple[_Rows, object | None]:
    """Return rows, and the generators' states after them, or None if making them drew no random numbers."""
    with drawing_alike(0):
        before = generator_states()
        columns: Mapping[str, Any] = dict(collate(list(items)))
        after = generator_states()
        count = len(items)
        if any(len(values) != count for values in columns.values()):
            count = next(len(values) for values in columns.values() if len(values) != count)
        rows = [{name: np.asarray(values[row]) for name, values in columns.items()} for row in range(count)]
    return rows, None if after == before else after


def _are_equal(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return numbers_in(row) == numbers_in(other)


def _is_padded(row: Mapping[str, Any], alone: Mapping[str, Any]) -> bool:
    """Return whether a row may be another one with padding at its end or its beginning, by its tokens and labels."""
    length, missing = len(alone["input_ids"]), len(row["input_ids"]) - len(alone["input_ids"])
    if missing <= 0:
        return False
    columns = [(row[name], alone[name]) for name in ("input_ids", "labels") if name in alone and alone[name].ndim == 1]
    for kept, rest in ((slice(length), slice(length, None)), (slice(missing, None), slice(missing))):
        if all(np.array_equal(long[kept], short) for long, short in columns):
            return "labels" not in row or row["labels"].ndim != 1 or bool((row["labels"][rest] == IGNORED_LABEL).all())
    return False
