"""A partition of a Kafka topic as a shard: kafka://HOST:PORT[,HOST:PORT…]/TOPIC#PARTITION.

`kafka://…/TOPIC?partitions=8` names eight of them. Other parameters are properties of librdkafka
(https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md), except `format`, which says what a message's
value is: `json` (an object with text, as a line of a .jsonl file), `text`, or `tokens` (bytes of `data.token_dtype`).

No group is joined and no offset committed: the run knows its position and reads by it, and can go back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
import numpy.typing as npt

from oobleck.errors import ConfigError, ShardUnreadable
from oobleck.job import DataSpec

from .shard_reader import NO_TOKEN, Extent, RecordText, row_of_tokens, text_in_json

_TIMEOUT_S = 10.0
_READ_AHEAD = 64
_END = "end"
_OWN = ("partitions", "format")
_PROPERTIES: Mapping[str, object] = {
    "group.id": "oobleck",  # the client asks for one
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",  # a message that is gone must not be another one
    "fetch.wait.max.ms": 20,
    "log_level": 0,  # what matters is raised
}


def partitions_of(name: str) -> Sequence[str]:
    """Return the names of the partitions that a name stands for. Raises ConfigError if it does not say how many."""
    parts = urlsplit(name)
    if parts.fragment:
        return (name,)
    count = dict(parse_qsl(parts.query)).get("partitions", "")
    if not count.isdecimal() or int(count) == 0:
        raise ConfigError(
            f"data.shards: {name} must say how many partitions the topic has: add ?partitions=N, or #PARTITION for one"
        )
    return tuple(f"{name}#{number}" for number in range(int(count)))


class KafkaShard:
    """One partition. A position is an offset. With `data.follow`, a message with a header `end` marks its end."""

    def __init__(self, name: str, data: DataSpec, text: RecordText) -> None:
        """Raises ConfigError if the name is not a partition's, or Kafka's client is not installed."""
        try:
            import confluent_kafka
        except ImportError as error:
            raise ConfigError(
                "data.shards: Kafka's client is not installed here: pip install confluent-kafka"
            ) from error
        self._kafka: Any = confluent_kafka
        parts = urlsplit(name)
        asked = dict(parse_qsl(parts.query))
        self._topic = parts.path.strip("/")
        login, _, brokers = parts.netloc.rpartition("@")
        if not brokers or not self._topic or not parts.fragment.isdecimal():
            raise ConfigError(f"data.shards: {name} names no partition; write kafka://HOST:PORT/TOPIC#PARTITION")
        self._partition = int(parts.fragment)
        self._num_partitions = int(asked["partitions"]) if "partitions" in asked else None
        self._row = self._reading(asked.get("format", "json"), data, text)
        self._follows = data.follow
        self._properties = {
            **{key: value for key, value in asked.items() if key not in _OWN},
            **_PROPERTIES,
            **_access(login, is_encrypted=parts.scheme == "kafkas"),
            "bootstrap.servers": brokers,
        }
        self._consumer: Any = None
        self._ahead: dict[int, Any] = {}

    def _reading(self, form: str, data: DataSpec, text: RecordText) -> Callable[[bytes], npt.NDArray[np.int64]]:
        match form:
            case "json":
                return lambda value: text.row(text_in_json(value, data.text_column, where="a message"))
            case "text":
                return lambda value: text.row(value.decode(errors="replace"))
            case "tokens":
                return lambda value: row_of_tokens(value, data, where="a message")
        raise ConfigError(f"data.shards: format={form} is none of json, text and tokens")

    def survey(self, start: int, limit: int) -> Extent:
        bounds, items = [start], list[int]()
        is_end = not self._follows
        for message in self._messages(start):
            if _END in dict(message.headers() or ()):
                is_end = True
                break
            if len(items) == limit:
                is_end = False
                break
            try:
                items.append(int((self._row(message.value() or b"") != NO_TOKEN).sum()) - 1)
            except ShardUnreadable:
                # The records before it are reported first.
                if items:
                    return Extent(bounds=tuple(bounds), items=tuple(items))
                raise
            bounds.append(message.offset() + 1)
        return Extent(bounds=tuple(bounds), items=tuple(items), is_end=is_end)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        offset = stop - 1
        if offset not in self._ahead:
            self._ahead.clear()
            for message in self._messages(offset):
                self._ahead[message.offset()] = message
                if len(self._ahead) == _READ_AHEAD:
                    break
        if offset not in self._ahead:
            raise ShardUnreadable(f"its message {offset} is gone; keep messages until a checkpoint has passed them")
        return self._row(self._ahead.pop(offset).value() or b"")

    def _messages(self, start: int) -> Iterator[Any]:
        """Yield the messages from an offset on, up to the partition's present end."""
        with self._telling():
            consumer = self._connected()
            consumer.assign([self._kafka.TopicPartition(self._topic, self._partition, start)])
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            with self._telling():
                message = consumer.poll(max(0.0, deadline_s - time.monotonic()))
            if message is None:
                raise ShardUnreadable(f"{self._properties['bootstrap.servers']} has not answered for {_TIMEOUT_S:g} s")
            if (error := message.error()) is None:
                yield message
                deadline_s = time.monotonic() + _TIMEOUT_S
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                return
            else:
                raise ShardUnreadable(error.str())

    def _connected(self) -> Any:
        """Return the consumer. Raises ShardUnreadable if the topic has not as many partitions as the job says."""
        if self._consumer is None:
            consumer = self._kafka.Consumer(self._properties)
            topic = consumer.list_topics(self._topic, timeout=_TIMEOUT_S).topics[self._topic]
            if topic.error is not None:
                raise ShardUnreadable(f"the topic {self._topic}: {topic.error.str()}")
            found = len(topic.partitions)
            if self._num_partitions not in (None, found) or self._partition >= found:
                raise ShardUnreadable(
                    f"the topic {self._topic} has {found} partitions; name them by ?partitions={found}"
                )
            self._consumer = consumer
        return self._consumer

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except self._kafka.KafkaException as error:
            raise ShardUnreadable(error.args[0].str()) from error


def _access(login: str, *, is_encrypted: bool) -> Mapping[str, str]:
    """Return the properties by which the client shows who it is, for `user:password` and TLS."""
    user, _, password = login.partition(":")
    protocol = ("SASL_" if login else "") + ("SSL" if is_encrypted else "PLAINTEXT")
    if protocol == "PLAINTEXT":
        return {}
    names = {"sasl.username": unquote(user), "sasl.password": unquote(password)} if login else {}
    return {"security.protocol": protocol, **({"sasl.mechanism": "PLAIN"} if login else {}), **names}
