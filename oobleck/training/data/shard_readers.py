"""Shards as they lie: files of tokens or of lines, and streams, all read by position.

A position is a whole number that grows: a row of tokens, a byte of text, an entry's number in a stream. Whatever a
shard is, it answers two questions: which records begin at a position, and what is in a record.
"""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from oobleck.errors import ConfigError, ShardUnreadable
from oobleck.host.user_path import expand_user
from oobleck.job import DataSpec

from .record_text import NO_TOKEN, RecordText
from .redis_shard import RedisShard
from .shard_files import LineShard, TokenShard
from .shard_reader import Extent, ShardReader

_TOKEN_SUFFIXES = (".bin", ".npy")
_STREAMS: dict[str, Callable[[str, DataSpec, RecordText], ShardReader]] = {"redis": RedisShard, "rediss": RedisShard}


def register_stream(scheme: str, open_shard: Callable[[str, DataSpec, RecordText], ShardReader]) -> None:
    """Have shards whose names begin with `scheme://` opened by a function of (name, data, text): for a job's script."""
    _STREAMS[scheme] = open_shard


class ShardSet:
    """All shards of a job, opened when they are first asked for. For one thread."""

    def __init__(self, data: DataSpec) -> None:
        """Raises ConfigError for names that stand for nothing, and for text without a tokenizer."""
        self._data = data
        self._text = RecordText(data)
        self.names = _names(data)
        # A stream's reader says at once what is missing; it connects when it is first asked.
        self._open = {shard: _open(name, data, self._text) for shard, name in enumerate(self.names) if _is_stream(name)}
        texts = [name for name in self.names if not _is_stream(name) and Path(name).suffix not in _TOKEN_SUFFIXES]
        if texts and data.tokenizer is None:
            raise ConfigError(f"data.shards: {texts[0]} is text; name a tokenizer by data.tokenizer, or give tokens")

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer, where there is one."""
        return self._text.vocab_size

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
            name = self.names[shard]
            try:
                self._open[shard] = _open(name, self._data, self._text)
            except ShardUnreadable as error:
                raise error.of(shard, start) from error
        return self._open[shard]


def _names(data: DataSpec) -> tuple[str, ...]:
    names: list[str] = []
    for given in data.shards:
        if _is_stream(given):
            _opener(given)
            names.append(given)
            continue
        path = str(expand_user(given))
        found = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
        files = [name for name in found if not Path(name).is_dir() and not name.endswith(".end")]
        if not files or not (data.follow or all(Path(name).is_file() for name in files)):
            raise ConfigError(f"data.shards: there is no file {given} on this node")
        names += files
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"data.shards: {twice} is named twice; name each shard once, and use data.epochs")
    return tuple(names)


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
    if Path(name).suffix in _TOKEN_SUFFIXES:
        return TokenShard(Path(name), data)
    return LineShard(Path(name), data, text)
