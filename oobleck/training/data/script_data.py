"""Samples that a script makes, or a dataset has: anything with a length whose items are tokens, or mappings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oobleck.errors import ConfigError

from .samples import ModelInputs, Sample, read_sample, side_by_side

__all__ = ["ScriptSamples", "check_alone", "numbers_in", "read_item"]

_DIGESTED_SAMPLES = 64


class ScriptSamples:
    """A source of samples: a list, an array, a torch dataset. An item is a row of tokens, or a mapping that has it as
    `input_ids`, beside labels, masks and whatever the model takes.

    Raises ConfigError for what has no length or no samples.
    """

    def __init__(
        self, make: Callable[[], Any], *, sequence_length: int, vocab_size: int, place: str = "the script's data"
    ) -> None:
        """`place` is where they are from, for messages."""
        self._place = place
        try:
            self._samples = make()
            if not hasattr(self._samples, "__len__"):
                raise ConfigError(f"{place}: it has no length; say streaming=True, and it is read one after the other")
            self._num_samples = len(self._samples)
        except ConfigError:
            raise
        # It is somebody else's code, and may fail in any way.
        except Exception as error:
            raise ConfigError(f"{self._place}: {type(error).__name__}: {error}") from error
        self._length = sequence_length
        self._vocab_size = vocab_size
        if not self._num_samples:
            raise ConfigError(f"{self._place}: it has no samples")
        self._digest = self._digest_some()

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def mask_id(self) -> int | None:
        return None

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def sequence_length(self) -> int:
        return self._length

    def sample(self, index: int, inputs: ModelInputs) -> Sample:
        """Return a sample by index. Raises ConfigError where it does not fit the model."""
        place = f"{self._place}: sample {index}"
        return read_item(self._item(index), inputs, place=place, length=self._length, vocab_size=self._vocab_size)

    def check(self, inputs: ModelInputs) -> None:
        """Look at some samples from all over. Raises ConfigError where one does not fit the model."""
        for index in self._some():
            sample = self.sample(index, inputs)
            check_alone(sample, inputs, place=f"{self._place}: sample {index}", length=self._length)

    def _item(self, index: int) -> Any:
        try:
            return self._samples[index]
        # As above.
        except Exception as error:
            raise ConfigError(f"{self._place}: sample {index}: {type(error).__name__}: {error}") from error

    def _some(self) -> list[int]:
        """Samples from all over."""
        numbers = np.linspace(0, self._num_samples - 1, min(self._num_samples, _DIGESTED_SAMPLES))
        return [int(number) for number in numbers]

    def _digest_some(self) -> str:
        """Digest the number of samples, and the numbers in some of them."""
        digest = hashlib.blake2b(f"{self._num_samples}".encode(), digest_size=16)
        for index in self._some():
            digest.update(numbers_in(self._item(index)))
        return digest.hexdigest()


def read_item(item: Any, inputs: ModelInputs, *, place: str, length: int, vocab_size: int) -> Sample:
    """Return a script's item as a sample. Raises ConfigError, with its place, where it does not fit the model."""
    try:
        return read_sample(item, inputs, length=length, vocab_size=vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    # It is somebody else's, and may be anything.
    except Exception as error:
        raise ConfigError(f"{place}: {type(error).__name__}: {error}") from error


def check_alone(sample: Sample, inputs: ModelInputs, *, place: str, length: int) -> None:
    """Look at a sample as a batch of its own. Raises ConfigError, with its place, where it does not fit the model."""
    try:
        side_by_side([sample], inputs, length=length)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def numbers_in(item: Any) -> bytes:
    """Return the numbers in an item of a dataset, with the names and shapes that they have, to be digested."""
    found: list[bytes] = []
    for name, value in sorted(item.items()) if isinstance(item, Mapping) else [("", item)]:
        values = np.asarray(value)
        if values.dtype.kind in "iubf":
            found += [f"{name}:{values.dtype.str}{values.shape}".encode(), values.tobytes()]
    return b"".join(found)
