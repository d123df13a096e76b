"""What a worker tells that it has as all others do: equal where it is made again, another digest where it is not."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oobleck.control.nodes import Alike, version_of
from oobleck.job import DataSpec, JobSpec, ModelSpec, ScriptSpec
from oobleck.training.assembly import assemble
from oobleck.training.data import Dataset
from oobleck.training.likeness import EpochThings, things_of_worker
from tests.training.data.test_collated import ROWS, TwoSteps, dataset

SCRIPT = """
import os
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from oobleck import Job

def model():
    return GPT2LMHeadModel(GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=8, vocab_size=300, bos_token_id=1, resid_pdrop={drop}
    ))

class Samples:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {sample}

def job():
    return Job(model=model, data=Samples)
"""
JOB = JobSpec(
    model=ModelSpec(type="script"),
    data=DataSpec(sequence_length=8, vocab_size=300),
    global_batch_size=4,
    microbatch_size=2,
)


def things(directory: Path, *, drop: float = 0.1, sample: str = "[3 + index] * 8") -> dict[str, str]:
    script = ScriptSpec(name="train.py", source=SCRIPT.format(drop=drop, sample=sample), directory=str(directory))
    return dict(things_of_worker(assemble(replace(JOB, script=script), cache_dir=directory)))


def test_what_a_script_makes_again_is_alike(tmp_path: Path):
    drawn = "torch.randint(3, 300, (8,)).tolist()"
    first = things(tmp_path, sample=drawn)
    torch.rand(3)
    random.random()
    assert things(tmp_path, sample=drawn) == first
    assert first[version_of("torch")] == torch.__version__.partition("+")[0]
    assert first.keys() >= {Alike.STRUCTURE, Alike.LOSS, Alike.FIRST_SAMPLES, version_of("transformers")}


@pytest.mark.parametrize(
    ("values", "thing"),
    [
        ({"drop": 0.2}, Alike.STRUCTURE),
        ({"sample": "[4 + index] * 8"}, Alike.FIRST_SAMPLES),
        ({"sample": "[9] * 7"}, Alike.FIRST_SAMPLES),
    ],
)
def test_what_it_makes_differently_shows(tmp_path: Path, values: dict[str, Any], thing: str):
    one, other = things(tmp_path), things(tmp_path, **values)
    assert {name for name in one if one[name] != other[name]} == {thing}


def test_each_epoch_is_told_once_by_whoever_enters_it():
    data = Dataset(dataset(ROWS).source, inputs=dataset(ROWS).inputs, order=TwoSteps())
    of = EpochThings(replace(JOB, global_batch_size=2, microbatch_size=1), data)
    assert [of.enter(step) for step in (1, 2)] == [None, None], "what is told before the first step"
    entered = of.enter(4)
    assert entered is not None
    epoch, found = entered
    assert (epoch, dict(found)[Alike.ORDER]) == (1, "310")
    assert of.enter(3) is None
    newcomer = EpochThings(replace(JOB, global_batch_size=2, microbatch_size=1), data)
    assert newcomer.enter(3) == entered, "whichever of its steps is its first"


def test_samples_without_an_order_of_their_own_have_epochs_by_their_number():
    of = EpochThings(replace(JOB, global_batch_size=3, microbatch_size=1), dataset(ROWS))
    entered = [of.enter(step) for step in range(1, 6)]
    assert [None if each is None else each[0] for each in entered] == [None, None, 1, 2, 3]
