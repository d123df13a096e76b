"""Microbatches are read one ahead, and copied without the host waiting; what a script draws stays the same."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oobleck.errors import ConfigError, ShardUnreadable
from oobleck.training.data.batches import Batch
from oobleck.training.data.data import Dataset
from oobleck.training.data.samples import ModelInputs
from oobleck.training.data.script_data import ScriptSamples
from oobleck.training.model.models import StageModel
from oobleck.training.step.reading import BatchReader, Reading, may_draw
from tests.training.fake_cuda import FakeCuda
from tests.training.zoo import SEQUENCE_LENGTH, VOCAB_SIZE, structure_of

TIMEOUT_S = 60


class Samples:
    """A script's dataset, which notes what is read, by which thread."""

    def __init__(self) -> None:
        self.read: list[tuple[int, str]] = []
        self.has_read = threading.Semaphore(0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> list[int]:
        self.read.append((index, threading.current_thread().name))
        tokens = self.tokens(index)
        self.has_read.release()
        return tokens

    def tokens(self, index: int) -> list[int]:
        return [(index + position) % VOCAB_SIZE for position in range(SEQUENCE_LENGTH)]


def dataset_of(samples: Samples) -> Dataset:
    source = ScriptSamples(lambda: samples, sequence_length=SEQUENCE_LENGTH, vocab_size=VOCAB_SIZE)
    dataset = Dataset(source).with_inputs(ModelInputs())
    samples.read.clear()
    samples.has_read = threading.Semaphore(0)
    return dataset


def model_of(name: str, **changes: Any) -> StageModel:
    return StageModel(replace(structure_of(name), **changes), dtype=torch.float32, device="cpu")


@contextmanager
def reading(dataset: Dataset, *, count: int = 4, **changes: Any) -> Iterator[Reading]:
    """Read so many microbatches of one sample."""
    reader = BatchReader(dataset, model_of("llama", **changes))
    with closing(reader.begin(lambda number: dataset.batch([number], step=1), range(count))) as begun:
        yield begun


def test_the_next_microbatch_is_read_while_one_is_computed_and_no_further_one() -> None:
    samples = Samples()
    with reading(dataset_of(samples)) as begun:
        for number in range(4):
            assert begun.take(number).input_ids[0, 0] == number
            read_ahead = min(number + 2, 4)
            while samples.read[-1][0] < read_ahead - 1:  # nobody asks for it
                assert samples.has_read.acquire(timeout=TIMEOUT_S)
            time.sleep(0.01)
            assert [index for index, _ in samples.read] == list(range(read_ahead))
    assert {thread for _, thread in samples.read} == {"read ahead"}


def test_data_that_takes_as_long_as_computing_adds_one_microbatch_to_a_step_and_no_more() -> None:
    class Slow(Samples):
        is_slow = False

        def tokens(self, index: int) -> list[int]:
            time.sleep(0.1 * self.is_slow)
            return super().tokens(index)

    samples = Slow()
    dataset = dataset_of(samples)
    samples.is_slow = True
    waited_s = 0.0
    with reading(dataset, count=8) as begun:
        for number in range(8):
            began_s = time.monotonic()
            begun.take(number)
            waited_s += time.monotonic() - began_s
            time.sleep(0.1)
    assert waited_s < 0.4, "0.1 s for the first; 0.8 s one after the other"


@pytest.mark.parametrize("draws", [False, True])
def test_a_script_is_read_by_the_thread_that_computes_where_the_model_may_draw(draws: bool) -> None:
    """The model's draws and the script's are of the same generators, which are the whole process's."""
    samples = Samples()
    with reading(dataset_of(samples), draws_at_random=draws) as begun:
        begun.take(0)
        begun.take(1)
    own = threading.current_thread().name
    assert {thread for _, thread in samples.read} == {own if draws else "read ahead"}


def test_a_scripts_modules_and_hooks_may_draw_as_well() -> None:
    class Noisy(torch.nn.Module):
        """A script's own."""

    model = model_of("llama")
    assert not may_draw(model)
    model.model.add_module("noisy", Noisy())
    assert may_draw(model)
    assert may_draw(model_of("llama", hooks={"lm_head.weight": ()}))
    assert may_draw(model_of("llama", draws_at_random=True))


def test_what_needs_no_script_is_read_ahead_whatever_the_model_draws() -> None:
    class Rows:
        digest, vocab_size, mask_id, num_samples, sequence_length = "", VOCAB_SIZE, None, 8, SEQUENCE_LENGTH

        def __init__(self) -> None:
            self.threads: set[str] = set()

        def rows(self, indices: Sequence[int]) -> Any:
            self.threads.add(threading.current_thread().name)
            return np.zeros((len(indices), SEQUENCE_LENGTH), dtype=np.int64)

    rows = Rows()
    with reading(Dataset(rows), draws_at_random=True) as begun:  # type: ignore[arg-type]
        for number in range(4):
            begun.take(number)
    assert rows.threads == {"read ahead"}


def test_what_a_script_draws_is_the_same_and_nobody_notices() -> None:
    class Drawn(Samples):
        def tokens(self, index: int) -> list[int]:
            drawn = random.random() + np.random.rand() + float(torch.rand(()))
            return [int(drawn * 1000) % VOCAB_SIZE] * SEQUENCE_LENGTH

    dataset = dataset_of(Drawn())
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with reading(dataset) as begun:
        ahead = [begun.take(number).input_ids for number in range(4)]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert all(torch.equal(ids, dataset.batch([number], step=1).input_ids) for number, ids in enumerate(ahead))
    assert len({int(ids[0, 0]) for ids in ahead}) > 1


def test_a_scripts_error_is_raised_where_its_sample_is_taken_with_its_place_and_traceback() -> None:
    class Broken(Samples):
        is_broken = False

        def tokens(self, index: int) -> list[int]:
            if index == 2 and self.is_broken:
                raise ValueError("no such picture")
            return super().tokens(index)

    samples = Broken()
    dataset = dataset_of(samples)
    samples.is_broken = True
    with reading(dataset) as begun:
        begun.take(0)
        begun.take(1)
        with pytest.raises(ConfigError) as caught:
            begun.take(2)
    with pytest.raises(ConfigError) as plain:
        dataset.batch([2], step=1)
    assert str(caught.value) == str(plain.value) == "the script's data: sample 2: ValueError: no such picture"
    assert "in tokens" in "".join(traceback.format_exception(caught.value))
    assert samples.read[-2][1] == threading.current_thread().name, "the script's code fails in the thread it knows"


def test_what_belongs_to_the_thread_that_made_it_is_read_by_that_thread(caplog: pytest.LogCaptureFixture) -> None:
    class Table(Samples):
        def __init__(self) -> None:
            super().__init__()
            self.database = sqlite3.connect(":memory:")

        def tokens(self, index: int) -> list[int]:
            ((first,),) = self.database.execute("select ?", (index,))
            return [first] * SEQUENCE_LENGTH

    samples = Table()
    dataset = dataset_of(samples)
    reader = BatchReader(dataset, model_of("llama"))
    for _ in range(2):
        with closing(reader.begin(lambda number: dataset.batch([number], step=1), range(3))) as begun:
            assert [int(begun.take(number).input_ids[0, 0]) for number in range(3)] == [0, 1, 2]
    assert [thread for _, thread in samples.read].count("read ahead") == 1, "it is tried once"
    assert "SQLite objects created in a thread" in caplog.text
    samples.database.close()


def test_a_shard_that_cannot_be_read_is_told_as_it_is_and_not_read_twice() -> None:
    calls: list[int] = []

    def load(number: int) -> Batch:
        calls.append(number)
        raise ShardUnreadable("it is gone", shard=3, position=7)

    reader = BatchReader(dataset_of(Samples()), model_of("llama"))
    with closing(reader.begin(load, range(2))) as begun, pytest.raises(ShardUnreadable, match="it is gone"):
        begun.take(0)
    assert calls == [0]


def test_an_interrupted_program_leaves_no_read_under_way() -> None:
    """Whatever comes after it may read, and draw, itself."""
    began, may_end = threading.Event(), threading.Event()

    def load(number: int) -> Batch:
        if number == 1:
            began.set()
            assert may_end.wait(TIMEOUT_S)
        return Batch(input_ids=torch.zeros(1, 4, dtype=torch.int64), labels=torch.zeros(1, 4, dtype=torch.int64))

    reader = BatchReader(dataset_of(Samples()), model_of("llama"))
    begun = reader.begin(load, range(4))
    begun.take(0)
    assert began.wait(TIMEOUT_S)
    threading.Timer(0.2, may_end.set).start()
    begun.close()
    assert may_end.is_set()


def test_on_a_gpu_batches_are_copied_once_from_pinned_memory_beside_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from other memory would have the host wait for all that it has launched."""
    model = model_of("llama")
    dataset = dataset_of(Samples())
    fake, pinned = FakeCuda(monkeypatch), list[int]()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        assert 0 not in tensor.stride(), "torch keeps strides, and copies into no memory that elements share"
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    model.device = torch.device("cuda", 0)
    tokens = torch.arange(16).reshape(2, 8)
    others = {"attention_mask": torch.ones(2, 8, dtype=torch.int64), "position_ids": torch.arange(8).expand(2, -1)}

    def load(_: int) -> Batch:
        return Batch(input_ids=tokens, labels=tokens, others=others)

    reader = BatchReader(dataset, model)
    with closing(reader.begin(load, range(2))) as begun:
        first = begun.take(0)
        second = begun.take(1)
    assert pinned.count(tokens.data_ptr()) == 2, "tokens are the labels, and copied once"
    assert len(pinned) == 6
    assert first.input_ids is first.labels
    assert torch.equal(second.input_ids, tokens)
    assert second.others["position_ids"].tolist() == [[*range(8)]] * 2
    assert second.counted == 14
    copies = [line for line in fake.log if line.startswith("copy on")]
    (stream,) = {line.removeprefix("copy on ") for line in copies}
    assert stream != "computing"
    assert len(copies) == 6
    assert not [line for line in copies if line.endswith("blocking")]
    assert fake.log.count(f"computing waits for an event of {stream}") == 6
    assert fake.log.count("memory in use on computing") == 6
    assert not [line for line in fake.log if line.startswith(f"{threading.current_thread().name} waits")]
    assert fake.computes_on["read ahead"] == model.device
