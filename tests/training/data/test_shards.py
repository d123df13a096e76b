"""Shards as they lie: every reader tells the same records, whatever it is asked, and names what it cannot read."""

from __future__ import annotations

import json
import queue
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from oobleck.control.protocol import DataPosition, RecordRun, ScanAnswer, ScanRange, ScanRequest, StepRecords
from oobleck.errors import ConfigError, ShardUnreadable
from oobleck.job import DataSpec, JobSpec, ScriptSpec
from oobleck.training.assembly import assemble
from oobleck.training.data.batches import IGNORED_LABEL
from oobleck.training.data.data import prepare_dataset
from oobleck.training.data.shard_files import LineShard
from oobleck.training.data.shard_reader import NO_TOKEN, Extent, ShardReader
from oobleck.training.data.shard_readers import RecordText, ShardSet, register_stream
from oobleck.training.data.shard_scanner import ShardScanner
from tests.examples import examples

LENGTH = 4


def spec(*shards: object, **more: object) -> DataSpec:
    return DataSpec(shards=tuple(map(str, shards)), sequence_length=LENGTH, vocab_size=300, **more)


def rows(count: int, first: int = 0) -> np.ndarray:
    return (np.arange(first * LENGTH, (first + count) * LENGTH) % 300).reshape(count, LENGTH)


def save_tokenizer(directory: Path) -> str:
    """One token a word: w1, w2, ..."""
    words = {"<|endoftext|>": 0, **{f"w{number}": number for number in range(1, 50)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(name="tokenizer")
def _tokenizer(tmp_path: Path) -> str:
    return save_tokenizer(tmp_path)


def read_all(shards: ShardSet, extent: Extent, shard: int = 0) -> list[list[int]]:
    worker_ids = zip(extent.bounds[:-1], extent.bounds[1:], strict=True)
    return [shards.read(shard, start, stop).tolist() for start, stop in worker_ids]


def test_rows_of_tokens_are_told_and_read(tmp_path: Path):
    rows(5).astype("<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", rows(3, first=5).astype(np.int32))
    shards = ShardSet(spec(tmp_path / "a.bin", tmp_path / "b.npy"))
    first = shards.survey(0, 0, 3)
    assert (first.bounds, first.is_end) == ((0, 1, 2, 3), False)
    rest = shards.survey(0, 3, 3)
    assert (rest.bounds, rest.is_end) == ((3, 4, 5), True)
    assert read_all(shards, first) + read_all(shards, rest) == rows(5).tolist()
    other = shards.survey(1, 0, 10)
    assert other.is_end
    assert read_all(shards, other, 1) == rows(3, first=5).tolist()


def test_a_row_that_is_not_whole_is_no_record_until_it_is(tmp_path: Path):
    path = tmp_path / "a.bin"
    whole = rows(2).astype("<u2").tobytes()
    path.write_bytes(whole[:-1])
    shards = ShardSet(spec(path, follow=True))
    assert shards.survey(0, 0, 9) == Extent(bounds=(0, 1), is_end=False)
    path.write_bytes(whole)
    (tmp_path / "a.bin.end").touch()
    assert shards.survey(0, 1, 9) == Extent(bounds=(1, 2), is_end=True)


def test_a_file_that_is_followed_may_come_later_and_one_that_is_not_may_not(tmp_path: Path):
    path = tmp_path / "later.bin"
    assert ShardSet(spec(path, follow=True)).survey(0, 0, 9) == Extent(bounds=(0,), is_end=False)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        ShardSet(spec(path))


@pytest.mark.parametrize(
    ("content", "expectation"),
    [(b"\x01\x00", "row 0 is not whole"), (b"\xff\xff" * LENGTH, "token 65535")],
)
def test_what_cannot_be_read_names_shard_and_position(tmp_path: Path, content: bytes, expectation: str):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ShardUnreadable, match=expectation) as caught:
        ShardSet(spec(tmp_path / "a.bin")).read(0, 0, 1)
    assert (caught.value.shard, caught.value.position) == (0, 0)


def test_a_file_that_shrinks_is_told(tmp_path: Path):
    rows(2).astype("<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(ShardUnreadable, match=r"2 .*\b5"):
        ShardSet(spec(tmp_path / "a.bin")).survey(0, 5, 1)


def test_patterns_are_sorted_and_nothing_is_named_twice(tmp_path: Path):
    for name in ("b.bin", "a.bin", "a.bin.end"):
        (tmp_path / name).touch()
    assert ShardSet(spec(tmp_path / "*")).names == (str(tmp_path / "a.bin"), str(tmp_path / "b.bin"))
    with pytest.raises(ConfigError, match="named twice"):
        ShardSet(spec(tmp_path / "*", tmp_path / "a.bin"))


def test_text_needs_a_tokenizer(tmp_path: Path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ConfigError, match="tokenizer"):
        ShardSet(spec(tmp_path / "a.jsonl"))


def test_a_line_is_a_sample_cut_or_followed_by_nothing(tmp_path: Path, tokenizer: str):
    lines = [{"text": "w1 w2"}, {"text": "w3 w4 w5 w6 w7"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shards = ShardSet(spec(tmp_path / "a.jsonl", tokenizer=tokenizer))
    extent = shards.survey(0, 0, 9)
    assert (extent.items, extent.is_end) == ((2, 3), True)
    assert read_all(shards, extent) == [[1, 2, 0, NO_TOKEN], [3, 4, 5, 6]]


def test_what_comes_before_a_broken_line_is_told_first(tmp_path: Path, tokenizer: str):
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n{"text": 3}\n{"text": "w2"}\n')
    shards = ShardSet(spec(tmp_path / "a.jsonl", tokenizer=tokenizer))
    extent = shards.survey(0, 0, 9)
    assert (len(extent.bounds), extent.is_end) == (2, False)
    with pytest.raises(ShardUnreadable, match="'text'"):
        shards.survey(0, extent.bounds[-1], 9)


@examples(100)
@given(
    lines=st.lists(st.lists(st.integers(1, 49), max_size=5), max_size=8),
    cuts=st.lists(st.integers(0, 200), max_size=4),
    limit=st.integers(1, 5),
    ends_whole=st.booleans(),
)
def test_lines_that_are_written_in_pieces_are_told_once(tmp_path_factory, lines, cuts, limit, ends_whole):
    directory = tmp_path_factory.mktemp("lines")
    data = spec("x", tokenizer=save_tokenizer(directory))
    path = directory / "grows.txt"
    text = "\n".join(" ".join(f"w{word}" for word in line) for line in lines).encode() + (b"\n" if ends_whole else b"")
    reader = LineShard(path, DataSpec(shards=("x",), follow=True, sequence_length=LENGTH), RecordText(data))
    found: list[list[int]] = []
    at = 0

    def look() -> bool:
        nonlocal at
        extent = reader.survey(at, limit)
        for start, stop in zip(extent.bounds[:-1], extent.bounds[1:], strict=True):
            found.append([token for token in reader.read(start, stop).tolist() if token > 0])
        at = extent.bounds[-1]
        return extent.is_end

    for cut in sorted(cuts):
        path.write_bytes(text[:cut])
        look()
    path.write_bytes(text)
    (directory / "grows.txt.end").touch()
    for _ in range(20):
        if look():
            break
    assert found == [line[:LENGTH] for line in lines if line]


def test_streams_of_ones_own_are_opened_by_their_scheme(tmp_path: Path):
    class Counting:
        def survey(self, start: int, limit: int) -> Extent:
            return Extent(bounds=tuple(range(start, start + limit + 1)))

        def read(self, start: int, stop: int) -> np.ndarray:
            return np.full(LENGTH, start)

    def open_counting(name: str, data: DataSpec, text: RecordText) -> ShardReader:
        return Counting()

    with pytest.raises(ConfigError, match="kafka://, kafkas://, redis"):
        ShardSet(spec("pulsar://broker/topic"))
    register_stream("counting", open_counting)
    shards = ShardSet(spec("counting://x"))
    assert shards.survey(0, 7, 2).bounds == (7, 8, 9)
    assert shards.read(0, 8, 9).tolist() == [8] * LENGTH


def test_a_step_takes_what_it_was_told_and_nothing_where_there_is_no_more(tmp_path: Path):
    rows(5).astype("<u2").tofile(tmp_path / "a.bin")
    dataset = prepare_dataset(spec(tmp_path / "a.bin"), cache_dir=tmp_path)
    records = dataset.records
    assert records is not None
    told = StepRecords(
        device=0,
        assignment_version=1,
        step=3,
        runs=(RecordRun(shard=0, bounds=(2, 3, 4, 5)),),
        num_items=9,
        after=DataPosition(records=43),
        is_last=True,
    )
    assert not records.is_told(3)
    records.put(told)
    records.follow(1, step=2)
    numbers, num_items = records.numbers_of(3, 4)
    assert (numbers, num_items) == ((40, 41, 42, -1), 9)
    batch = dataset.batch(numbers, step=3)
    assert batch.input_ids[:3].tolist() == rows(5)[2:].tolist()
    assert batch.labels[3].tolist() == [IGNORED_LABEL] * LENGTH
    assert batch.input_ids.min() >= 0
    assert records.position == DataPosition(records=43)
    records.follow(2, step=2)
    assert not records.is_told(3), "that was of an older edition"


def test_a_worker_answers_what_lies_in_shards_and_what_cannot_be_read(tmp_path: Path):
    rows(2).astype("<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "b.npy").write_bytes(b"this is no array")
    said: queue.SimpleQueue[ScanAnswer] = queue.SimpleQueue()
    scanner = ShardScanner(ShardSet(spec(tmp_path / "a.bin", tmp_path / "b.npy")).survey, 0, said.put)
    wants = tuple(ScanRange(shard=shard, start=0, limit=5) for shard in (0, 1))
    scanner.ask(ScanRequest(device=0, request=7, wants=wants))
    answer = said.get(timeout=10)
    assert (answer.request, answer.found[0].bounds, answer.found[0].is_end) == (7, (0, 1, 2), True)
    assert answer.found[1].problem is not None
    assert "no array of tokens" in answer.found[1].problem


def test_a_script_that_makes_the_data_leaves_no_place_for_shards(tmp_path: Path):
    source = "from oobleck import Job\n\ndef job():\n    return Job(data=lambda: [[1, 2, 3, 4]])\n"
    script = ScriptSpec(name="train.py", source=source, provides=("data",))
    job = JobSpec(data=spec(tmp_path / "a.bin"), script=script)
    with pytest.raises(ConfigError, match="the script makes the data itself"):
        assemble(job, cache_dir=tmp_path)
