"""A bit flips in the memory of a worker: it is found, the node is named, and the others' copy replaces it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from oobleck.cli.inputs.job_file import load_job
from oobleck.training.data.data import Dataset, open_source
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure

from .harness import Runner, incidents, oobleck, worker_pids

LAYER = 2
FROZEN = ("--set", "optimizer.learning_rate=1e-30", "--set", "optimizer.weight_decay=0")
"""Weights that stay what they are can be found by what they are."""


def initial_bytes(runner: Runner) -> bytes:
    """A piece of the initial weights of a layer, which no other memory holds."""
    path = runner.job_file()
    job = load_job(path.read_text(), source=str(path))
    vocab_size = Dataset(open_source(job.text, cache_dir=runner.directory / "cache")).vocab_size
    structure = ModelStructure.from_spec(job.model, vocab_size=vocab_size, sequence_length=job.data.sequence_length)
    model = StageModel(structure, dtype=torch.float64, device="cpu")
    model.adopt(LAYER, LAYER + 1, {})
    model.initialize([LAYER], seed=job.seed)
    name = next(name for name in structure.layer_parameters(LAYER) if name.endswith("c_fc.weight"))
    return model.parameters[name].detach().reshape(-1)[:16].numpy().tobytes()


def flip_a_bit(pid: int, pattern: bytes) -> int:
    """Flip the lowest bit of a process's memory wherever the pattern is; returns how often it was there."""
    found = 0
    with Path(f"/proc/{pid}/maps").open() as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            region = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.. \S+ \S+ \d+\s*(.*)", line)
            if region is None or region[3].startswith("/"):
                continue
            start, stop = int(region[1], 16), int(region[2], 16)
            try:
                raw = os.pread(memory.fileno(), stop - start, start)
            except OSError:
                continue
            at = raw.find(pattern)
            while at >= 0:
                os.pwrite(memory.fileno(), bytes([raw[at] ^ 1]), start + at)
                found += 1
                at = raw.find(pattern, at + 1)
    return found


@pytest.mark.slow
def test_a_flipped_bit_is_found_named_and_repaired(runner: Runner) -> None:
    options = ("--job", str(runner.job_file()), "--steps", "400", "--set", "checkpoint.compare_steps=5", *FROZEN)
    pattern = initial_bytes(runner)
    with runner.up(*options, "--pipelines", "3", nodes=("--local", "3")) as up:
        up.wait_for_step(3)
        assert flip_a_bit(worker_pids(runner)["node1"], pattern) >= 1
        up.wait_for("node1 repaired; ")
        up.wait_for_steps(12)
        oobleck("stop", "--base-dir", str(runner.base_dir))
        outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.count("differs") == 1, "once repaired, copies are equal again"
    (incident,) = incidents(runner)
    assert (incident["root"]["failure"], incident["root"]["node"]) == ("corruption", "node1")
    found = incident["root"]["entry"]
    assert (found["layer"], found["odd"], found["is_sure"]) == (LAYER, [{"node": "node1", "device": 0}], True)
    (recovery,) = outcome.recoveries
    assert (recovery["cause"], recovery["nodes"]) == ("corruption", ["node1"])
    assert recovery["bytes_moved"] > 0
    assert outcome.summary["steps_lost"] == 0
