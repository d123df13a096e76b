"""Text of a record as a sample: its tokens and an end, cut to a sample's length, or followed by nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from oobleck.errors import ShardUnreadable
from oobleck.job import DataSpec

from .tokenizer import load_tokenizer

NO_TOKEN = -1
"""Where a sample has no token: its record was shorter."""


class RecordText:
    """How a job turns text into samples. Without a tokenizer there is no text."""

    def __init__(self, data: DataSpec) -> None:
        """Raises ConfigError where the tokenizer cannot be read."""
        self._length = data.sequence_length
        self._tokenizer: Tokenizer | None = None
        self._end = 0
        self.vocab_size = data.vocab_size
        if data.tokenizer is not None:
            self._tokenizer, self._end = load_tokenizer(data.tokenizer)
            self.vocab_size = self._tokenizer.get_vocab_size()

    def row(self, text: str) -> npt.NDArray[np.int64]:
        """Return a sample, [length]. Raises ShardUnreadable without a tokenizer."""
        if self._tokenizer is None:
            raise ShardUnreadable("it holds text, and data.tokenizer names no tokenizer")
        tokens = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end][: self._length]
        row = np.full(self._length, NO_TOKEN, dtype=np.int64)
        row[: len(tokens)] = tokens
        return row

    def num_items(self, text: str) -> int:
        """How many tokens a sample predicts: all but its first."""
        return int((self.row(text) != NO_TOKEN).sum()) - 1
