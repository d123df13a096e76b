"""Samples from shards: records that are found by one worker, and read by each where its own lie."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from oobleck.job import DataSpec

from .record_text import NO_TOKEN
from .records import NO_SAMPLE, Records
from .shard_readers import ShardSet
from .tokenizer import tokenizer_file


class ShardSource:
    """A source whose samples have the numbers that `records` gives. Equal digests mean the same shards, by name."""

    mask_id = None

    def __init__(self, data: DataSpec) -> None:
        """Raises ConfigError for shards that cannot be there, and for text without a tokenizer."""
        self.records = Records()
        self._data = data
        self._shards = ShardSet(data)
        digest = hashlib.blake2b("\n".join(self._shards.names).encode(errors="surrogatepass"), digest_size=16)
        digest.update(repr((data.sequence_length, data.token_dtype, data.text_column)).encode())
        if data.tokenizer is not None:
            digest.update(tokenizer_file(data.tokenizer).read_bytes())
        self._digest = digest.hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        return self._shards.names

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def vocab_size(self) -> int:
        return self._shards.vocab_size

    @property
    def num_samples(self) -> int:
        """How many samples are known beforehand: none."""
        return 0

    @property
    def sequence_length(self) -> int:
        return self._data.sequence_length

    def reopened(self) -> ShardSet:
        """Return the shards with readers of their own, for another thread."""
        return ShardSet(self._data)

    def rows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return records of the step by number, [indices, length], with NO_TOKEN where there is none.

        Raises ShardUnreadable.
        """
        rows = np.full((len(indices), self.sequence_length), NO_TOKEN, dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            if index != NO_SAMPLE:
                record = self.records.locate(index)
                row[:] = self._shards.read(record.shard, record.start, record.stop)
        return rows
