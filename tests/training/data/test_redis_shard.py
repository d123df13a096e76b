"""A Redis stream as a shard, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import ConfigError, ShardUnreadable
from oobleck.job import DataSpec
from oobleck.training.data.redis_shard import entry_id, position_of
from oobleck.training.data.shard_reader import NO_TOKEN
from oobleck.training.data.shard_readers import ShardSet
from tests.examples import examples
from tests.redis_server import needs_redis, serve_redis
from tests.training.data.test_shards import LENGTH, save_tokenizer


@pytest.fixture(scope="module", name="port")
def _port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with serve_redis(tmp_path_factory.mktemp("redis")) as port:
        yield port


def spec(port: int, key: str, **more: object) -> DataSpec:
    return DataSpec(shards=(f"redis://127.0.0.1:{port}/{key}",), sequence_length=LENGTH, vocab_size=300, **more)


def client(port: int):
    import redis

    return redis.Redis(port=port)


@examples(100)
@given(time_ms=st.integers(0, (1 << 43) - 1), sequence=st.integers(0, (1 << 20) - 1))
def test_ids_are_positions_in_the_same_order(time_ms: int, sequence: int):
    position = position_of(f"{time_ms}-{sequence}".encode())
    assert entry_id(position) == f"{time_ms}-{sequence}"
    assert position < 1 << 63
    assert position_of(f"{time_ms}-0".encode()) <= position


def test_an_id_that_is_too_large_is_told():
    with pytest.raises(ShardUnreadable, match="beyond"):
        position_of(b"1-1048576")


@needs_redis
def test_entries_are_told_and_read_by_position(port: int, tmp_path: Path):
    with client(port) as stream:
        for number in range(5):
            tokens = np.arange(number, number + LENGTH, dtype="<u2").tobytes()
            stream.xadd("tokens", {"tokens": tokens}, id=f"7-{number + 1}" if number < 3 else "*")
        shards = ShardSet(spec(port, "tokens"))
        first = shards.survey(0, 0, 2)
        assert (len(first.bounds), first.items, first.is_end) == (3, (LENGTH - 1,) * 2, False)
        rest = shards.survey(0, first.bounds[-1], 9)
        assert (len(rest.bounds), rest.is_end) == (4, True)
        bounds = (*first.bounds, *rest.bounds[1:])
        for number, (start, stop) in enumerate(pairwise(bounds)):
            assert shards.read(0, start, stop).tolist() == list(range(number, number + LENGTH))
        stream.xdel("tokens", "7-2")
        with pytest.raises(ShardUnreadable, match="7-2 is gone"):
            shards.read(0, bounds[1], bounds[2])


@needs_redis
def test_a_stream_is_followed_until_its_end_is_marked(port: int, tmp_path: Path):
    with client(port) as stream:
        shards = ShardSet(spec(port, "grows", follow=True, tokenizer=save_tokenizer(tmp_path)))
        assert shards.survey(0, 0, 9).bounds == (0,)
        stream.xadd("grows", {"text": "w1 w2"})
        extent = shards.survey(0, 0, 9)
        assert (len(extent.bounds), extent.items, extent.is_end) == (2, (2,), False)
        assert shards.read(0, *extent.bounds).tolist() == [1, 2, 0, NO_TOKEN]
        stream.set("grows:end", 1)
        assert shards.survey(0, extent.bounds[-1], 9).is_end


@needs_redis
@pytest.mark.slow
def test_a_server_that_is_gone_is_told_and_asked_again(tmp_path: Path):
    with serve_redis(tmp_path) as port:
        shards = ShardSet(spec(port, "x", follow=True))
        assert shards.survey(0, 0, 9).bounds == (0,)
    with pytest.raises(ShardUnreadable, match="ConnectionError"):
        shards.survey(0, 0, 9)


@needs_redis
def test_a_name_without_a_stream_is_refused():
    with pytest.raises(ConfigError, match="redis://localhost:6379"):
        ShardSet(DataSpec(shards=("redis://localhost:6379",)))
