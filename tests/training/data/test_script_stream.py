"""Samples without a length have positions all the same: they are read once, in whatever order they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.protocol import DataPosition, RecordRun, StepRecords
from oobleck.errors import ConfigError, ShardUnreadable
from oobleck.host.script import SCRIPT_STREAM, Job
from oobleck.job import DataSpec, JobSpec, ScriptSpec
from oobleck.training.assembly import assemble
from oobleck.training.data.batches import IGNORED_LABEL
from oobleck.training.data.data import Dataset
from oobleck.training.data.records import NO_SAMPLE
from oobleck.training.data.samples import ModelInputs
from oobleck.training.data.script_data import ScriptSamples
from oobleck.training.data.script_stream import ScriptStream
from tests.examples import examples

LENGTH = 6
INPUTS = ModelInputs(names=frozenset({"attention_mask"}))


class Counted:
    """Something to iterate over that counts how often it was begun, and how many it gave."""

    def __init__(self, count: int, *, fails_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at
        self.begun = self.given = 0

    def __call__(self) -> Iterator[dict[str, Any]]:
        self.begun += 1
        for number in range(self.count):
            if number == self.fails_at:
                raise OSError("the disk is gone")
            self.given += 1
            yield {"input_ids": [number % 50] * (1 + number % LENGTH)}


def stream_of(make: Any, *, num_kept: int = 1000) -> ScriptStream:
    return ScriptStream(make, sequence_length=LENGTH, vocab_size=50, num_kept=num_kept)


def told(stream: ScriptStream, positions: tuple[int, ...], *, step: int = 1, records: int = 0, batch: int = 4) -> Any:
    """Tell it that a step takes some samples one after the other; returns their numbers."""
    runs = (RecordRun(shard=0, bounds=(*positions, positions[-1] + 1)),)
    after = DataPosition(records=records + len(positions))
    stream.records.put(
        StepRecords(device=0, assignment_version=0, step=step, runs=runs, num_items=9, after=after, is_last=False)
    )
    return stream.records.numbers_of(step, batch)[0]


def survey_all(stream: ScriptStream, limit: int) -> list[int]:
    bounds = [0]
    while True:
        extent = stream.survey(0, bounds[-1], limit)
        assert extent.bounds[0] == bounds[-1]
        assert len(extent.bounds) <= limit + 1
        bounds += extent.bounds[1:]
        if extent.is_end:
            return bounds


@given(count=st.integers(1, 40), limit=st.integers(1, 50))
@examples(40)
def test_a_survey_finds_each_sample_and_the_end(count: int, limit: int) -> None:
    source = Counted(count)
    stream = stream_of(source)
    assert survey_all(stream, limit) == list(range(count + 1))
    assert (source.begun, source.given) == (1, count), "what was seen is not asked for again"
    assert stream.survey(0, count, limit).is_end


@given(
    order=st.lists(st.integers(0, 29), min_size=1, max_size=30), num_kept=st.integers(1, 40), looks=st.integers(0, 30)
)
@examples(60)
def test_each_sample_is_the_one_at_its_position_whatever_was_asked_before(
    order: list[int], num_kept: int, looks: int
) -> None:
    stream = stream_of(Counted(30), num_kept=num_kept)
    for number, position in enumerate(order):
        if looks:
            stream.survey(0, number % 30, looks)
        (index, *_) = told(stream, (position,), step=number + 1, records=number)
        assert stream.sample(index, INPUTS).tokens.tolist() == [position] * (1 + position % LENGTH)


def test_it_begins_again_for_what_it_has_given_and_not_kept() -> None:
    source = Counted(100)
    stream = stream_of(source, num_kept=10)
    survey_all(stream, 7)
    assert source.begun == 1
    (index, *_) = told(stream, (3,))
    assert stream.sample(index, INPUTS).tokens.tolist() == [3] * 4
    assert source.begun == 2


def test_two_threads_find_the_same() -> None:
    stream = stream_of(Counted(3000), num_kept=500)
    with ThreadPoolExecutor(2) as pool:
        surveyed = pool.submit(survey_all, stream, 100)
        for step in range(1, 300):
            (index, *_) = told(stream, (step * 7,), step=step, records=step)
            assert stream.sample(index, INPUTS).tokens[0] == step * 7 % 50
        assert surveyed.result(60) == list(range(3001))


def test_what_fails_says_so_and_is_tried_again() -> None:
    source = Counted(20, fails_at=8)
    stream = stream_of(source)
    extent = stream.survey(0, 0, 50)
    assert (extent.bounds[-1], extent.is_end) == (8, False), "what was found before counts"
    with pytest.raises(ShardUnreadable, match="sample 8: OSError: the disk is gone"):
        stream.survey(0, 8, 50)
    (index, *_) = told(stream, (9,))
    with pytest.raises(ShardUnreadable) as error:
        stream.sample(index, INPUTS)
    assert (error.value.shard, error.value.position) == (0, 9)
    source.fails_at = None
    assert stream.survey(0, 8, 50).is_end
    assert stream.sample(index, INPUTS).tokens[0] == 9


def test_one_that_ends_sooner_another_time_is_no_shard() -> None:
    source = Counted(20)
    stream = stream_of(source, num_kept=4)
    stream.survey(0, 0, 15)
    source.count = 5
    (index, *_) = told(stream, (7,))
    with pytest.raises(ShardUnreadable, match="ended before sample 7, which it had before"):
        stream.sample(index, INPUTS)


def test_a_step_that_is_not_full_is_filled_with_what_does_not_count() -> None:
    dataset = Dataset(stream_of(Counted(20))).with_inputs(INPUTS)
    numbers = told(dataset.source, (18, 19))  # type: ignore[arg-type]
    assert numbers == (0, 1, NO_SAMPLE, NO_SAMPLE)
    whole, nothing = dataset.batch(numbers[:2]), dataset.batch(numbers[2:])
    assert nothing.num_items == 0
    assert (nothing.labels == IGNORED_LABEL).all()
    assert nothing.input_ids.shape == whole.input_ids.shape
    assert nothing.others.keys() == whole.others.keys() == {"attention_mask"}


def test_labels_of_whole_samples_are_ignored_where_there_is_none() -> None:
    def labelled() -> Iterator[dict[str, Any]]:
        yield from ({"input_ids": np.full(LENGTH, number), "label": number % 2} for number in range(9))

    inputs = ModelInputs(task="sequence_classification", num_labels=2)
    dataset = Dataset(stream_of(labelled)).with_inputs(inputs)
    numbers = told(dataset.source, (8,))  # type: ignore[arg-type]
    assert dataset.batch(numbers).labels.tolist() == [0, IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL]


def test_samples_of_datasets_skip_to_where_they_are_wanted() -> None:
    import datasets

    made = Counted(60)
    stream = stream_of(lambda: datasets.IterableDataset.from_generator(made), num_kept=5)
    survey_all(stream, 60)
    (index, *_) = told(stream, (40,))
    assert stream.sample(index, INPUTS).tokens[0] == 40


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="the script's data: it has no samples"):
        stream_of(Counted(0))
    with pytest.raises(ConfigError, match="the script's data: sample 0: OSError"):
        stream_of(Counted(3, fails_at=0))
    with pytest.raises(ConfigError, match="the script's data: TypeError: 'int' object is not iterable"):
        stream_of(lambda: 3)
    with pytest.raises(ConfigError, match=r"it has no length; say streaming=True"):
        ScriptSamples(Counted(9), sequence_length=LENGTH, vocab_size=50)
    wrong = Dataset(stream_of(lambda: iter([{"input_ids": [1], "colour": [2]}])))
    with pytest.raises(ConfigError, match=r"^the script's data: sample 0: its column 'colour' is used by nothing"):
        wrong.with_inputs(INPUTS)
    with pytest.raises(ConfigError, match="pass a function as `data`"):
        Job(data={"paths": ["a.txt"]}, streaming=True)


def test_masked_models_want_samples_with_numbers(tmp_path: Any) -> None:
    source = (
        "from oobleck import Job\n"
        "def job():\n"
        "    return Job(model='bert', data=lambda: iter([[1, 2, 3]] * 9), streaming=True)\n"
    )
    script = ScriptSpec(name="train.py", source=source, provides=("data",))
    data = DataSpec(shards=(SCRIPT_STREAM,), sequence_length=LENGTH, vocab_size=300)
    config = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    model = JobSpec().model.__class__(type="bert", config=config)
    with pytest.raises(ConfigError, match="streaming: tokens are masked by the numbers of samples"):
        assemble(JobSpec(model=model, data=data, script=script), cache_dir=tmp_path)
