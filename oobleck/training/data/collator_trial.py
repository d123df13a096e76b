"""Tries whether samples and collated rows are the same each time, and whichever others are next to them.

A batch is cut into microbatches over nodes, and each goes through the dataset's `__getitems__`, if there is one, and
the collator by itself. Both together are one function of the samples' numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from oobleck.errors import ConfigError, UncutModel
from oobleck.training.counters import counter_of
from oobleck.training.randomness import drawing_alike, generator_states

from . import script_data as script
from .batches import IGNORED_LABEL

_TRIED_SAMPLES = 8
_COLLATOR = "data_collator"
_IDS = "input_ids"

_Rows = list[dict[str, Any]]
_Make = Callable[[Sequence[int]], Mapping[str, Any]]
"""Turns numbers of samples into named arrays, [samples, …]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRow:
    """A row that is longer with others next to it than alone."""

    padded: Mapping[str, Any]
    alone: Mapping[str, Any]
    num_left: int
    """The number of tokens that are added before the sample's own."""
    made_by: str
    """Names whose code adds them."""

    @property
    def num_right(self) -> int:
        return len(self.padded[_IDS]) - len(self.alone[_IDS]) - self.num_left


def try_collator(samples: Any, collate: script.Collate, *, place: str, batch_size: int) -> tuple[PaddedRow, ...]:
    """Raise ConfigError if samples or collated rows depend on earlier calls, or rows on other rows except by padding,
    and UncutModel for a collator that puts samples into one row.

    Returns the rows that are padded only because of others. `samples` is a sequence, and `place` names it; the script
    by itself collates `batch_size` of them at a time. Reads a few samples a few times.
    """
    padded: tuple[PaddedRow, ...] = ()
    # Samples at equal distances may all have one length.
    drawn = random.Random(0).sample(range(len(samples)), min(len(samples), _TRIED_SAMPLES))
    numbers = sorted({0, *drawn})[:_TRIED_SAMPLES]
    # Errors of the user's code are reported where its samples are read.
    with suppress(LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError):
        if (fault := _fault_of_samples(samples, numbers)) is None:
            trial = _Trial(samples, collate, numbers, together=batch_size > 1)
            if (fault := trial.fault_of_rows(place) or trial.fault_of_later_rows()) is None:
                padded = tuple(trial.padded_rows())
        if fault is not None:
            raise ConfigError(f"{place}: {fault}")
    return padded


def try_repeats(samples: Any, collate: script.Collate, *, place: str, batch_size: int) -> None:
    """Raise ConfigError if samples, or what is collated of them, depend on earlier calls. Reads a few a few times.

    The script by itself collates `batch_size` of them at a time.
    """
    numbers = script.from_all_over(len(samples), _TRIED_SAMPLES)
    if (fault := _fault_of_samples(samples, numbers)) is not None:
        raise ConfigError(f"{place}: {fault}")
    numbers = numbers[:batch_size]

    def collated() -> bytes:
        with drawing_alike(0):
            return script.numbers_in(dict(collate(script.items_of(samples, numbers))))

    first = collated()
    if (counter := counter_of({_COLLATOR: collate}, lambda: collated() == first)) is not None:
        raise ConfigError(
            f"{place}: {_COLLATOR} returns other rows later, by {counter}, which changes with every call, and "
            f"{script.ASKED_AGAIN}"
        )


def _fault_of_samples(samples: Any, numbers: Sequence[int]) -> str | None:
    for number in numbers:
        if _read(samples, number) != _read(samples, number):
            return f"sample {number} is another one when it is read again, and {script.ASKED_AGAIN}"
    first = [_read(samples, number) for number in numbers]
    counter = counter_of({"the dataset": samples}, lambda: [_read(samples, number) for number in numbers] == first)
    if counter is not None:
        return (
            f"some samples are others later, by {counter}, which changes whenever they are read, and "
            f"{script.ASKED_AGAIN}"
        )
    return None


def _read(samples: Any, number: int) -> bytes:
    with drawing_alike(number):
        return script.numbers_in_all(script.items_of(samples, [number]))


class _Trial:
    """Rows of some samples, made together and alone."""

    def __init__(self, samples: Any, collate: script.Collate, numbers: Sequence[int], *, together: bool) -> None:
        """`together` says whether the script by itself reads several samples at once, if the dataset can."""
        self._samples = samples
        self._numbers = numbers
        self._owners: dict[str, object] = {_COLLATOR: collate}
        with drawing_alike(0):
            parts = [script.items_of(samples, [number]) for number in numbers]
        # `__getitems__` may return columns instead of items, which cannot be put together here.
        has_columns = any(isinstance(part, Mapping) for part in parts)
        self._items = parts if has_columns else [item for part in parts for item in part]
        self._reads_together = script.reads_together(samples) and (together or has_columns)
        if self._reads_together:
            self._owners["the dataset"] = samples
            self._make: _Make = lambda some: collate(self._read(some))
        else:
            self._make = lambda some: collate([self._items[each] for each in some])

    def fault_of_rows(self, place: str) -> str | None:
        count = len(self._numbers)
        together, drawn = self._rows(range(count))
        if (made := len(together)) != count:
            raise UncutModel(
                f"{place}: {self._who()} makes {made} rows of {count} samples; it must keep one row for each sample: "
                "leave samples out, or pack them, in the dataset itself",
                reason=f"the rows of its batches are not one for each sample, but {made} for {count}",
            )
        alone = [self._rows([each]) for each in range(count)]
        again, _ = self._rows(range(count))
        if not all(map(_are_equal, together, again)):
            return (
                f"{self._who()} returns other rows when it is called again with the same samples, and "
                f"{script.ASKED_AGAIN}"
            )
        if drawn is not None or any(has_drawn is not None for _, has_drawn in alone):
            # Rows differ by what was drawn for them, which depends on how many rows there are.
            return self._fault_of_drawn_rows()
        for row, (rows, _) in zip(together, alone, strict=True):
            if not _are_equal(row, rows[0]) and not _is_padded(row, rows[0]):
                return self._mixed()
        return None

    def fault_of_later_rows(self) -> str | None:
        every = range(len(self._numbers))
        first, _ = self._rows(every)

        def same() -> bool:
            return all(map(_are_equal, self._rows(every)[0], first))

        counter = counter_of(self._owners, same)
        if counter is None:
            return None
        return (
            f"{self._who()} returns other rows later, by {counter}, which changes with every call, and "
            f"{script.ASKED_AGAIN}"
        )

    def padded_rows(self) -> Iterator[PaddedRow]:
        """Yield the rows that are longer among all others than alone."""
        made_by = self._who()
        if made_by == _COLLATOR:
            # transformers wraps a collator in one that leaves columns out.
            collate: Any = self._owners[_COLLATOR]
            made_by = f"{_COLLATOR} {_place_of(getattr(collate, 'data_collator', collate))}"
        together, _ = self._rows(range(len(self._numbers)))
        for each, row in enumerate(together):
            (alone,), _ = self._rows([each])
            if (missing := len(row[_IDS]) - len(alone[_IDS])) <= 0:
                continue
            # Other tokens may have been drawn, of which most are the same.
            equal = [int((row[_IDS][start:][: len(alone[_IDS])] == alone[_IDS]).sum()) for start in (0, missing)]
            yield PaddedRow(padded=row, alone=alone, num_left=missing if equal[1] > equal[0] else 0, made_by=made_by)

    def _fault_of_drawn_rows(self) -> str | None:
        """Compare a row among others with the same row among copies of itself, if both draw equally many numbers."""
        forms = list(map(_form_of, self._items))
        alike = [each for each, form in enumerate(forms) if form == forms[0]]
        rows, drawn = self._rows(alike)
        copies, drawn_for_copies = self._rows([0] * len(alike))
        if len(alike) > 1 and drawn == self._rows([0])[1] is not None:
            return (
                f"{self._who()} draws random numbers for all rows of its batch at once, and batches are cut into "
                "microbatches over nodes, each of which would draw its own; have it draw numbers for each row"
            )
        return self._mixed() if drawn == drawn_for_copies and not _are_equal(rows[0], copies[0]) else None

    def _mixed(self) -> str:
        # Nodes cut a batch into microbatches, so a row must not depend on which others are next to it.
        return (
            f"{self._who()} makes another row of a sample when it has others next to it, and batches are cut into "
            "microbatches over nodes; have it make each row of its own sample, pad rows to the longest alone, and give "
            f"padding the label {IGNORED_LABEL}"
        )

    def _who(self) -> str:
        """Name whose code makes rows of samples: the dataset's, if it already reads other items together, or the
        collator.
        """
        if not self._reads_together:
            return _COLLATOR
        with drawing_alike(0):
            together = script.numbers_in_all(self._read(range(len(self._numbers))))
        if together == b"".join(map(script.numbers_in, self._items)):
            return _COLLATOR
        # A transform of Hugging Face's `datasets` reads batches, and is the script's own.
        of_format = getattr(self._samples, "format", None)
        of_format = of_format if isinstance(of_format, Mapping) else {}
        transform = (of_format.get("format_kwargs") or {}).get("transform")
        if transform is not None:
            return f"the transform {_place_of(transform)}"
        return f"the dataset's {_place_of(type(self._samples).__getitems__)}"

    def _read(self, some: Sequence[int]) -> Any:
        return script.items_of(self._samples, [self._numbers[each] for each in some])

    def _rows(self, some: Sequence[int]) -> tuple[_Rows, object | None]:
        """Return rows, and the generators' states after them, or None if making them drew no random numbers."""
        with drawing_alike(0):
            before = generator_states()
            columns: Mapping[str, Any] = dict(self._make(some))
            after = generator_states()
            count = len(some)
            if any(len(values) != count for values in columns.values()):
                count = next(len(values) for values in columns.values() if len(values) != count)
            rows = [{name: np.asarray(values[row]) for name, values in columns.items()} for row in range(count)]
        return rows, None if after == before else after


def _place_of(function: Any) -> str:
    """Return a function's name, and the file and line where it is defined."""
    while (inner := getattr(function, "func", None) or getattr(function, "__func__", None)) is not None:
        function = inner
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _form_of(item: Any) -> object:
    """Return the names and shapes of an item's values."""
    named = item.items() if isinstance(item, Mapping) else [("", item)]
    return sorted((str(name), np.shape(value)) for name, value in named)


def _are_equal(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return script.numbers_in(row) == script.numbers_in(other)


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
