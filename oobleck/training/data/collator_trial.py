"""What a dataset and a collator return, whoever wrote them: tried on some samples before anything is launched.

Each worker reads the samples of its own microbatches, and some of them again after a failure. So a sample must be the
same whenever it is read, and whatever was read before; and a collator may pad a row to the length of the others, and
otherwise must not look at them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from oobleck.errors import ConfigError
from oobleck.training.randomness import drawing_alike, generator_states

from .batches import IGNORED_LABEL
from .script_data import ASKED_AGAIN, Collate, from_all_over, numbers_in

_NUM_TRIED = 8


def try_collator(samples: Any, collate: Collate, *, place: str) -> None:
    """Raise ConfigError where samples or what is collated of them depend on earlier calls, or rows on other rows.

    `samples` are asked for by number, and `place` is where they are from. What does not run is left to those who read
    it. Reads a few samples a few times.
    """
    numbers = from_all_over(len(samples), _NUM_TRIED)
    with suppress(LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError):
        fault = _fault_of_samples(samples, numbers) or _fault_of_rows([samples[number] for number in numbers], collate)
        if fault is not None:
            raise ConfigError(f"{place}: {fault}")


def _fault_of_samples(samples: Any, numbers: Sequence[int]) -> str | None:
    for number in numbers:
        if _read(samples, number) != _read(samples, number):
            return f"sample {number} is another one when it is read again, and {ASKED_AGAIN}"
    return None


def _read(samples: Any, number: int) -> bytes:
    with drawing_alike(number):
        return numbers_in(samples[number])


_Rows = list[dict[str, Any]]


def _fault_of_rows(items: Sequence[Any], collate: Collate) -> str | None:
    together, draws = _collated(items, collate)
    alone = [_collated([item], collate) for item in items]
    again, _ = _collated(items, collate)
    if not all(map(_are_equal, together, again)):
        return f"data_collator returns other rows when it is called again with the same samples, and {ASKED_AGAIN}"
    if draws or any(has_drawn for _, has_drawn in alone):
        return None  # what is drawn depends on how many rows there are
    for row, (rows, _) in zip(together, alone, strict=True):
        if not _are_equal(row, rows[0]) and not _is_padded(row, rows[0]):
            return (
                "data_collator makes another row of a sample when it has others beside it, and batches are cut into "
                "microbatches over nodes; have it make each row of its own sample, pad rows to the longest alone, "
                f"and give padding the label {IGNORED_LABEL}"
            )
    return None


def _collated(items: Sequence[Any], collate: Collate) -> tuple[_Rows, bool]:
    """Return rows, and whether random numbers were drawn for them."""
    with drawing_alike(0):
        before = generator_states()
        columns: Mapping[str, Any] = dict(collate(list(items)))
        draws = generator_states() != before
        rows = [{name: np.asarray(values[row]) for name, values in columns.items()} for row in range(len(items))]
    return rows, draws


def _are_equal(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return numbers_in(row) == numbers_in(other)


def _is_padded(row: Mapping[str, Any], alone: Mapping[str, Any]) -> bool:
    """Say whether a row may be another one with padding at its end or its beginning, by its tokens and labels."""
    length, missing = len(alone["input_ids"]), len(row["input_ids"]) - len(alone["input_ids"])
    if missing <= 0:
        return missing < 0  # what was cut off is not known
    columns = [(row[name], alone[name]) for name in ("input_ids", "labels") if name in alone and alone[name].ndim == 1]
    for kept, rest in ((slice(length), slice(length, None)), (slice(missing, None), slice(missing))):
        if all(np.array_equal(long[kept], short) for long, short in columns):
            return "labels" not in row or row["labels"].ndim != 1 or bool((row["labels"][rest] == IGNORED_LABEL).all())
    return False
