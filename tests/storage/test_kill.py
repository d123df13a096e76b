"""Processes are killed at random moments of saving; what was whole before is there after, to the last bit."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from oobleck.storage import CheckpointDirectory, Manifest, checkpoint_name
from oobleck.training.checkpoint.state import StateReader

from .saving_processes import RUN, STEM, state_after


@pytest.fixture(scope="module")
def zygote() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.storage.saving_processes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


def read_step(path: Path) -> int:
    """The step that a process noted last; 0 for none."""
    raw = path.read_bytes() if path.exists() else b""
    return struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0


def newest_in_memory(reader: StateReader, num_layers: int) -> int:
    whole = [state.step for state, layers in reader.in_memory() if len(layers) == num_layers]
    return max(whole, default=0)


def complete(checkpoints: CheckpointDirectory) -> list[Manifest]:
    return [entry.manifest for entry in checkpoints.find() if entry.manifest is not None]


def newest_on_disk(checkpoints: CheckpointDirectory, num_layers: int) -> int:
    whole = [each.step for each in complete(checkpoints) if len(checkpoints.layers_here(each)) == num_layers]
    return max(whole, default=0)


def assert_state(reader: StateReader, step: int, num_layers: int) -> None:
    name = checkpoint_name(RUN, step=step, generation=1)
    for layer, tensors in state_after(step, num_layers).items():
        loaded = reader.load(name, layer)
        assert loaded.keys() == tensors.keys()
        for key, expected in tensors.items():
            assert loaded[key].dtype == expected.dtype
            assert torch.equal(loaded[key], expected), f"{key} of layer {layer} after step {step}"


def kill_rounds(zygote: subprocess.Popen, directory: Path, rounds: int, seed: int) -> None:
    """Start, kill the worker, the agent or both at a random moment, restore, and go on from there."""
    draw = random.Random(seed)
    checkpoints = CheckpointDirectory(directory / "disk")
    step, num_layers, moments = 1, 2, set()
    for number in range(rounds):
        if number % 5 == 4:
            num_layers = 5 - num_layers  # another share: other memory
        zygote.stdin.write(f"{directory} {step} {num_layers} {(0.002, 0.04)[number % 2]}\n")
        zygote.stdin.flush()
        worker, agent = map(int, zygote.stdout.readline().split())
        time.sleep(draw.uniform(0.0, 0.12))
        victims = draw.choice([(worker,), (agent,), (worker, agent), (agent, worker)])
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        if agent not in victims:
            wait_until_gone(agent)  # it writes what the worker has left, then its pipe ends
        for process in (worker, agent):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            wait_until_gone(process)

        reader = StateReader(directory / "memory", STEM, checkpoints)
        sealed, persisted = read_step(directory / "sealed"), read_step(directory / "persisted")
        for state, layers in reader.in_memory():
            assert_state(reader, state.step, len(layers))
        for manifest in complete(checkpoints):
            assert list(checkpoints.faults(manifest)) == []
            assert len(checkpoints.layers_here(manifest)) == len(manifest.layer_names)
        in_memory, on_disk = newest_in_memory(reader, num_layers), newest_on_disk(checkpoints, num_layers)
        if sealed >= step:  # else this round was killed before its first state was whole
            assert in_memory >= sealed
        if persisted >= step:
            assert on_disk >= persisted
            assert_from_disk_alone(checkpoints, on_disk, num_layers)
        moments.add((in_memory > sealed, on_disk > persisted, len(checkpoints.names()) > len(complete(checkpoints))))
        step = max(in_memory, on_disk, sealed, step) + 1
    assert step > rounds, "most rounds came to save something"
    assert len(moments) > 1 or rounds < 20, "kills met saves at different moments"


def assert_from_disk_alone(checkpoints: CheckpointDirectory, step: int, num_layers: int) -> None:
    assert_state(StateReader(Path("/nonexistent"), STEM, checkpoints), step, num_layers)


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + 30.0
    while time.monotonic() < deadline_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.002)
    raise AssertionError(f"process {pid} is still there")


def test_a_kill_at_any_moment_leaves_the_newest_whole_state(zygote: subprocess.Popen, tmp_path: Path) -> None:
    kill_rounds(zygote, tmp_path, rounds=4, seed=1)


@pytest.mark.slow
def test_two_hundred_kills_leave_the_newest_whole_state(zygote: subprocess.Popen, tmp_path: Path) -> None:
    kill_rounds(zygote, tmp_path, rounds=200, seed=2)
