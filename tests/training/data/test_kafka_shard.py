"""Partitions of a Kafka topic as shards, against librdkafka's own broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from oobleck.errors import ConfigError, ShardUnreadable
from oobleck.job import DataSpec
from oobleck.training.data.shard_reader import NO_TOKEN
from oobleck.training.data.shard_readers import ShardSet
from tests.kafka_broker import Broker, needs_kafka, serve_kafka
from tests.training.data.test_shards import LENGTH, save_tokenizer

pytestmark = needs_kafka


@pytest.fixture(scope="module", name="broker")
def _broker() -> Iterator[Broker]:
    with serve_kafka() as broker:
        yield broker


def spec(broker: Broker, rest: str, **more: object) -> DataSpec:
    return DataSpec(shards=(f"kafka://{broker.address}/{rest}",), sequence_length=LENGTH, vocab_size=300, **more)


def test_messages_of_tokens_are_told_and_read_by_offset(broker: Broker) -> None:
    rows = [np.arange(number, number + LENGTH, dtype="<u2") for number in range(100)]
    broker.produce("rows", 2, [row.tobytes() for row in rows])
    shards = ShardSet(spec(broker, "rows?format=tokens#2"))
    first = shards.survey(0, 0, 40)
    assert (first.bounds, first.items, first.is_end) == (tuple(range(41)), (LENGTH - 1,) * 40, False)
    rest = shards.survey(0, 40, 60)
    assert (rest.bounds[-1], rest.is_end) == (100, True)
    for start, stop in [*pairwise(first.bounds), *pairwise(rest.bounds), (7, 8)]:
        assert shards.read(0, start, stop).tolist() == rows[start].tolist()


def test_each_partition_is_a_shard_and_their_number_must_be_the_topics(broker: Broker, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    for partition in range(4):
        broker.produce("spread", partition, [json.dumps({"text": f"w{partition + 1}"}).encode()])
    shards = ShardSet(spec(broker, "spread?partitions=4", tokenizer=tokenizer))
    assert [shards.read(shard, 0, 1).tolist()[0] for shard in range(4)] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"add \?partitions=N"):
        ShardSet(spec(broker, "spread", tokenizer=tokenizer))
    with pytest.raises(ShardUnreadable, match=r"has 4 partitions; name them by \?partitions=4"):
        ShardSet(spec(broker, "spread?partitions=3", tokenizer=tokenizer)).survey(0, 0, 9)
    with pytest.raises(ShardUnreadable, match="the topic absent: Broker: Unknown topic"):
        ShardSet(spec(broker, "absent#0", tokenizer=tokenizer)).survey(0, 0, 9)


def test_a_partition_is_followed_until_its_end_is_marked(broker: Broker, tmp_path: Path) -> None:
    broker.produce("grows", 0, [b"makes the topic"])
    shards = ShardSet(spec(broker, "grows?format=text#1", follow=True, tokenizer=save_tokenizer(tmp_path)))
    for _ in range(3):
        assert shards.survey(0, 0, 9).bounds == (0,)
    broker.produce("grows", 1, [b"w1 w2"])
    extent = shards.survey(0, 0, 9)
    assert (extent.bounds, extent.items, extent.is_end) == ((0, 1), (2,), False)
    assert shards.read(0, *extent.bounds).tolist() == [1, 2, 0, NO_TOKEN]
    broker.produce("grows", 1, [b""], headers=["end"])
    assert shards.survey(0, 1, 9).is_end


def test_what_cannot_be_read_is_told(broker: Broker, tmp_path: Path) -> None:
    broker.produce("bad", 0, [b'{"text": "w1"}', b"w1"])
    shards = ShardSet(spec(broker, "bad#0", tokenizer=save_tokenizer(tmp_path)))
    assert shards.survey(0, 0, 9).bounds == (0, 1), "what is before it can be read"
    with pytest.raises(ShardUnreadable, match="a message is not JSON"):
        shards.survey(0, 1, 9)
    with pytest.raises(ShardUnreadable, match="out of range"):
        shards.read(0, 8, 9)


def test_a_broker_that_is_gone_is_told() -> None:
    with serve_kafka() as broker:
        broker.produce("rows", 0, [bytes(2 * LENGTH)])
        shards = ShardSet(spec(broker, "rows?format=tokens#0", follow=True))
        assert shards.survey(0, 0, 9).bounds == (0, 1)
    with pytest.raises(ShardUnreadable, match="has not answered"):
        shards.survey(0, 1, 9)


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ("#0", "names no partition"),
        ("rows#first", "names no partition"),
        ("rows?format=avro#0", "format=avro is none of json, text and tokens"),
    ],
)
def test_a_name_that_says_too_little_is_refused(rest: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ShardSet(DataSpec(shards=(f"kafka://localhost:9092/{rest}",), sequence_length=LENGTH, vocab_size=300))


def test_a_property_that_kafka_does_not_know_is_named(broker: Broker) -> None:
    with pytest.raises(ShardUnreadable, match=r"no\.such\.property"):
        ShardSet(spec(broker, "rows?format=tokens&no.such.property=1#0")).survey(0, 0, 1)
