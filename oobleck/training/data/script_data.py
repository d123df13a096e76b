"""Samples that a script makes: anything with a length whose items are tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oobleck.errors import ConfigError

from .columns import problem_with_row

__all__ = ["ScriptSamples"]

_DIGESTED_SAMPLES = 64


class ScriptSamples:
    """A source of samples: a list, an array, a torch dataset. An item is a row of tokens, or has it as `input_ids`.

    Labels and masks are refused, unless they say only what holds without them: labels that are the tokens, masks of
    ones. Raises ConfigError for what has no length, no samples, or samples of another length or with other tokens than
    the job says.
    """

    def __init__(self, make: Callable[[], Any], *, sequence_length: int, vocab_size: int) -> None:
        try:
            self._samples = make()
            self._num_samples = len(self._samples)
        # It is somebody else's code, and may fail in any way.
        except Exception as error:
            raise ConfigError(f"the script's data: {type(error).__name__}: {error}") from error
        self._length = sequence_length
        self._vocab_size = vocab_size
        if not self._num_samples:
            raise ConfigError("the script's data: it has no samples")
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

    def rows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return samples by index, [indices, length]."""
        return np.stack([self._row(int(index)) for index in indices])

    def _row(self, index: int) -> npt.NDArray[np.int64]:
        try:
            item = self._samples[index]
            columns = item if isinstance(item, Mapping) else {"input_ids": item}
            tokens = np.asarray(columns["input_ids"])
            problem = problem_with_row(columns, tokens)
        # As above: an item may be anything, and so may what happens when it is asked for.
        except Exception as error:
            raise ConfigError(f"the script's data: sample {index}: {type(error).__name__}: {error}") from error
        if problem is not None:
            raise ConfigError(f"the script's data: sample {index}: {problem}")
        if tokens.shape != (self._length,) or tokens.dtype.kind not in "iu":
            raise ConfigError(
                f"the script's data: sample {index} is {tokens.dtype} of the shape {tokens.shape}; it must be "
                f"data.sequence_length = {self._length} whole numbers"
            )
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ConfigError(
                f"the script's data: sample {index} has the token {tokens.max()}, and data.vocab_size is "
                f"{self._vocab_size}; raise it"
            )
        return tokens.astype(np.int64)

    def _digest_some(self) -> str:
        """Digest the number of samples, and some from all over."""
        digest = hashlib.blake2b(f"{self._num_samples}".encode(), digest_size=16)
        for index in np.linspace(0, self._num_samples - 1, min(self._num_samples, _DIGESTED_SAMPLES)).astype(np.int64):
            digest.update(self._row(int(index)).astype("<i8").tobytes())
        return digest.hexdigest()
