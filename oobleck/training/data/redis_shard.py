"""A Redis stream as a shard: redis://HOST:PORT/KEY, or redis://HOST:PORT/KEY?db=1.

An entry holds text in the field that `data.text_column` names, or tokens as bytes in the field `tokens`. Entries are
neither removed nor acknowledged: the run knows its position and reads by it, and can go back.
https://redis.io/docs/latest/develop/data-types/streams/ defines ids.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import numpy.typing as npt

from oobleck.errors import ConfigError, ShardUnreadable
from oobleck.job import DataSpec
from oobleck.job.secrets import public_url

from .columns import problem_with_columns
from .shard_reader import NO_TOKEN, Extent, RecordText, row_of_tokens

# An id is a time in milliseconds, for which 43 bits suffice until the year 2248, and a number within it.
_SEQUENCE_BITS = 20
_TIMEOUT_S = 5.0
_TOKENS = "tokens"


class RedisShard:
    """One stream. A position is an entry's id as a number. With `data.follow`, a key `KEY:end` marks its end."""

    def __init__(self, name: str, data: DataSpec, text: RecordText) -> None:
        """Raises ConfigError if the name is not a stream's, or Redis' client is not installed."""
        try:
            import redis
        except ImportError as error:
            raise ConfigError("data.shards: Redis' client is not installed here: pip install redis") from error
        parts = urlsplit(name)
        self._key = parts.path.strip("/")
        if not parts.hostname or not self._key:
            raise ConfigError(f"data.shards: {public_url(name)} names no stream; write redis://HOST:PORT/KEY")
        self._data = data
        self._text = text
        self._error = redis.RedisError
        self._redis: Any = redis.Redis(
            host=parts.hostname,
            port=parts.port or 6379,
            db=int(parse_qs(parts.query).get("db", ["0"])[0]),
            username=parts.username,
            password=parts.password,
            ssl=parts.scheme == "rediss",
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
        )

    def survey(self, start: int, limit: int) -> Extent:
        # Asked before the entries, or one that is written between the two commands would be missed.
        is_complete = not self._data.follow or bool(self._ask("exists", f"{self._key}:end"))
        entries = self._ask("xrange", self._key, min=entry_id(start), max="+", count=limit)
        bounds, items = [start], []
        for identity, fields in entries:
            try:
                position = position_of(identity)
                items.append(int((self._row(fields) != NO_TOKEN).sum()) - 1)
            except ShardUnreadable:
                # The records before it are reported first.
                if items:
                    return Extent(bounds=tuple(bounds), items=tuple(items))
                raise
            bounds.append(position + 1)
        return Extent(bounds=tuple(bounds), items=tuple(items), is_end=is_complete and len(entries) < limit)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        identity = entry_id(stop - 1)
        entries = self._ask("xrange", self._key, min=identity, max=identity, count=1)
        if not entries:
            raise ShardUnreadable(f"its entry {identity} is gone; keep entries until a checkpoint has passed them")
        return self._row(entries[0][1])

    def _row(self, fields: dict[bytes, bytes]) -> npt.NDArray[np.int64]:
        tokens = fields.get(_TOKENS.encode())
        others = (name.decode(errors="replace") for name in fields)
        problem = problem_with_columns(others, holds_list=lambda name: tokens is not None or name != "label")
        if problem is not None:
            raise ShardUnreadable(f"an entry: {problem}")
        if tokens is None:
            text = fields.get(self._data.text_column.encode())
            if text is None:
                raise ShardUnreadable(f"an entry has neither {self._data.text_column!r} nor {_TOKENS!r}")
            return self._text.row(text.decode(errors="replace"))
        return row_of_tokens(tokens, self._data, where="an entry")

    def _ask(self, command: str, *arguments: object, **options: object) -> Any:
        try:
            return getattr(self._redis, command)(*arguments, **options)
        except (self._error, OSError) as error:
            raise ShardUnreadable(f"{type(error).__name__}: {error}") from error


def position_of(identity: bytes) -> int:
    """Return an entry's id, `milliseconds-sequence`, as one number. Raises ShardUnreadable for one too large."""
    time_ms, _, sequence = identity.decode().partition("-")
    if int(time_ms) >= 1 << (63 - _SEQUENCE_BITS) or int(sequence) >= 1 << _SEQUENCE_BITS:
        raise ShardUnreadable(f"its entry {identity.decode()} has an id beyond {entry_id((1 << 63) - 1)}")
    return int(time_ms) << _SEQUENCE_BITS | int(sequence)


def entry_id(position: int) -> str:
    return f"{position >> _SEQUENCE_BITS}-{position & ((1 << _SEQUENCE_BITS) - 1)}"
