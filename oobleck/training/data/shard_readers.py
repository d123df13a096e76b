"""Shards, and the samples in them: files of tokens or of lines, and streams, all read by position.

A position is a whole number that grows: a row of tokens, a byte of text, an entry's number in a stream. Every shard
answers two questions: which records begin at a position, and what a record contains.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from oobleck.errors import ConfigError, ShardUnreadable
from oobleck.host.user_path import expand_user
from oobleck.job import DataSpec
from oobleck.job.secrets import public_url

from .kafka_shard import KafkaShard, partitions_of
from .records import NO_SAMPLE, Records
from .redis_shard import RedisShard
from .shard_files import LineShard, TokenShard
from .shard_reader import NO_TOKEN, Extent, RecordText, ShardReader
from .token_files import TOKEN_SUFFIXES
from .tokenizer import tokenizer_file

_OURS: Mapping[str, type[ShardReader]] = {
    "kafka": KafkaShard,
    "kafkas": KafkaShard,
    "redis": RedisShard,
    "rediss": RedisShard,
}
_STREAMS: dict[str, Callable[[str, DataSpec, RecordText], ShardReader]] = dict(_OURS)


def register_stream(scheme: str, open_shard: Callable[[str, DataSpec, RecordText], ShardReader]) -> None:
    """Have a job's shards with names `scheme://…` opened by a function of (name, data, text)."""
    _STREAMS[scheme] = open_shard


class ShardSource:
    """A source of samples, numbered by `records`. Equal digests mean the same shards, by name."""

    mask_id = None
    num_samples = 0  # known beforehand

    def __init__(self, data: DataSpec) -> None:
        """Raises ConfigError for shards that cannot exist, and for text without a tokenizer."""
        self.records = Records()
        self._data = data
        self._shards = ShardSet(data)
        self.sequence_length = data.sequence_length
        self.vocab_size = self._shards.vocab_size
        digest = hashlib.blake2b("\n".join(self._shards.names).encode(errors="surrogatepass"), digest_size=16)
        digest.update(repr((data.sequence_length, data.token_dtype, data.text_column)).encode())
        if data.tokenizer is not None:
            digest.update(tokenizer_file(data.tokenizer).read_bytes())
        self.digest = digest.hexdigest()

    def reopened(self) -> ShardSet:
        """Return the shards with separate readers, for another thread."""
        return ShardSet(self._data)

    @property
    def runs_script(self) -> bool:
        """Whether a stream is read by what a script has registered."""
        return any(_is_stream(name) and _opener(name) not in _OURS.values() for name in self._shards.names)

    def rows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the step's records by number, [indices, length], filled up with NO_TOKEN. Raises ShardUnreadable."""
        rows = np.full((len(indices), self.sequence_length), NO_TOKEN, dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            if index != NO_SAMPLE:
                record = self.records.locate(index)
                row[:] = self._shards.read(record.shard, record.start, record.stop)
        return rows


class ShardSet:
    """All shards of a job, for one thread. Files are opened on their first use."""

    def __init__(self, data: DataSpec) -> None:
        """Raises ConfigError for names without a file or stream, and for text without a tokenizer."""
        self._data = data
        self._text = RecordText(data)
        named = _names(data)
        self.names = tuple(named)
        """Without users and passwords of URLs, which may change between two masters."""
        self._places = tuple(named.values())
        self.vocab_size = self._text.vocab_size
        # The reader of a stream reports a missing package at once; it connects on its first use.
        self._open = {
            shard: _open(name, data, self._text) for shard, name in enumerate(self._places) if _is_stream(name)
        }
        texts = [name for name in self.names if not _is_stream(name) and Path(name).suffix not in TOKEN_SUFFIXES]
        if texts and data.tokenizer is None:
            raise ConfigError(f"data.shards: {texts[0]} is text; name a tokenizer by data.tokenizer, or give tokens")

    def survey(self, shard: int, start: int, limit: int) -> Extent:
        """See `ShardReader`. Raises ShardUnreadable."""
        return self._reader(shard, start).survey(start, limit)

    def read(self, shard: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """See `ShardReader`. Raises ShardUnreadable."""
        reader = self._reader(shard, start)
        try:
            row = reader.read(start, stop)
        except ShardUnreadable as error:
            raise error.of(shard, start) from error
        if row.max() >= self.vocab_size or row.min() < NO_TOKEN:
            problem = f"it has the token {row.max()}, and data.vocab_size is {self.vocab_size}"
            raise ShardUnreadable(problem, shard=shard, position=start)
        return row

    def _reader(self, shard: int, start: int) -> ShardReader:
        if shard not in self._open:
            try:
                self._open[shard] = _open(self._places[shard], self._data, self._text)
            except ShardUnreadable as error:
                raise error.of(shard, start) from error
        return self._open[shard]


def _names(data: DataSpec) -> dict[str, str]:
    """Return the places of shards by their names."""
    named: dict[str, str] = {}
    for shard in data.shards:
        if _is_stream(shard):
            for each in partitions_of(shard) if _opener(shard) is KafkaShard else (shard,):
                _add(named, public_url(each), each)
            continue
        path = str(expand_user(shard))
        matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
        files = [name for name in matches if not Path(name).is_dir() and not name.endswith(".end")]
        if not files or not (data.follow or all(Path(name).is_file() for name in files)):
            raise ConfigError(f"data.shards: there is no file {shard} on this node")
        for file in files:
            _add(named, file, file)
    return named


def _add(named: dict[str, str], name: str, place: str) -> None:
    if name in named:
        raise ConfigError(f"data.shards: {name} is named twice; name each shard once, and use data.epochs")
    named[name] = place


def _is_stream(name: str) -> bool:
    return "://" in name


def _opener(name: str) -> Callable[[str, DataSpec, RecordText], ShardReader]:
    scheme = urlsplit(name).scheme
    if scheme not in _STREAMS:
        known = ", ".join(f"{known}://" for known in sorted(_STREAMS))
        raise ConfigError(f"data.shards: nothing here reads {scheme}:// streams; known are {known}")
    return _STREAMS[scheme]


def _open(name: str, data: DataSpec, text: RecordText) -> ShardReader:
    if _is_stream(name):
        return _opener(name)(name, data, text)
    if Path(name).suffix in TOKEN_SUFFIXES:
        return TokenShard(Path(name), data)
    return LineShard(Path(name), data, text)
