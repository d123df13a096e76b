"""The interface of shards, and the conversion of a record's text into a sample."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from oobleck.errors import ShardUnreadable
from oobleck.job import DataSpec

from .columns import problem_with_columns
from .tokenizer import load_tokenizer

NO_TOKEN = -1
"""The filler of a sample whose record is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Consecutive records: record i lies in [bounds[i], bounds[i + 1])."""

    bounds: tuple[int, ...]
    """Begins with the position of the request. Positions are whole numbers of at most 63 bits."""
    items: tuple[int, ...] = ()
    """The number of tokens that each record predicts; empty if all records are as long as samples."""
    is_end: bool = False
    """Whether the shard will never have a record after these."""


class ShardReader(Protocol):
    """A shard. Its answer for a position stays true while records may still be read from there."""

    def survey(self, start: int, limit: int) -> Extent:
        """Return the records from position `start`, at most `limit`; 0 is the beginning. Raises ShardUnreadable."""

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return one record, [length], filled up with NO_TOKEN. Raises ShardUnreadable."""


class RecordText:
    """Turns text into samples: its tokens and an end, cut to a sample's length or filled up."""

    def __init__(self, data: DataSpec) -> None:
        """Raises ConfigError if the tokenizer cannot be read."""
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
        """Return the number of tokens that a sample predicts: all but its first."""
        return int((self.row(text) != NO_TOKEN).sum()) - 1


def text_in_json(record: bytes, column: str, *, where: str) -> str:
    """Return the text under a key of a JSON object. Raises ShardUnreadable, which says `where` it is."""
    try:
        value = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise ShardUnreadable(f"{where} is not JSON: {error}") from error
    if not isinstance(value, Mapping) or not isinstance(value.get(column), str):
        raise ShardUnreadable(f"{where} has no text under {column!r}; name its key by data.text_column")
    problem = problem_with_columns(value, holds_list=lambda name: isinstance(value[name], list))
    if problem is not None:
        raise ShardUnreadable(f"{where}: {problem}")
    return str(value[column])


def row_of_tokens(record: bytes, data: DataSpec, *, where: str) -> npt.NDArray[np.int64]:
    """Return a sample, [length], of tokens as bytes. Raises ShardUnreadable, which says `where` they are."""
    dtype = np.dtype(data.token_dtype).newbyteorder("<")
    if not record or len(record) % dtype.itemsize:
        raise ShardUnreadable(f"{where} has {len(record)} bytes of tokens, which are not {dtype.name}")
    row = np.full(data.sequence_length, NO_TOKEN, dtype=np.int64)
    values = np.frombuffer(record, dtype=dtype)[: len(row)]
    row[: len(values)] = values
    return row
