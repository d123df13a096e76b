"""Processes that save for ever, to be killed: a worker that copies, and an agent that writes to disk.

A zygote that has imported torch forks them, a pair for each line "DIRECTORY FIRST_STEP NUM_LAYERS PAUSE_S" on its
standard input, and answers with their process ids. The state after a step is a function of the step (`state_after`).
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from pathlib import Path

import torch

from oobleck.control.protocol import StateNotSaved, StateSaved
from oobleck.errors import CorruptCheckpoint
from oobleck.storage import MANIFEST_VERSION, CheckpointDirectory, Manifest, Slot, checkpoint_name, find_slots
from oobleck.training.checkpoint.state import FlashSaver

RUN = "0123abcd"
STEM = "device0"
_ROWS = 40_000


def state_after(step: int, num_layers: int) -> dict[int, dict[str, torch.Tensor]]:
    """Some hundred kilobytes a layer; every element tells the step, the layer and its place."""
    return {
        layer: {
            "weight": torch.arange(_ROWS, dtype=torch.float64) + 1e6 * step + 1e9 * layer,
            "optimizer.exp_avg.weight": torch.full((7, 3), 0.5 * step, dtype=torch.float32),
            "bias": torch.full((5,), step, dtype=torch.bfloat16),
        }
        for layer in range(num_layers)
    }


def save_step(directory: CheckpointDirectory, memory: Path, step: int, num_layers: int) -> Manifest:
    """Save the state after a step, through memory, as a run does."""
    reports: list[StateSaved | StateNotSaved] = []
    saver = FlashSaver(memory, STEM, metadata={"config": '{"model_type": "x"}'}, report=reports.append)
    name = checkpoint_name(RUN, step=step, generation=1)
    saver.save(state_after(step, num_layers), name=name, step=step, generation=1)
    until_s = time.monotonic() + 60
    while not reports:
        assert time.monotonic() < until_s, "it is not saved"
        time.sleep(0.001)
    assert isinstance(reports[0], StateSaved)
    slot = max(find_slots(memory, STEM), key=lambda each: each.sequence)
    manifest = manifest_of(step, num_layers, directory.persist(name, slot))
    directory.commit(manifest)
    return manifest


def manifest_of(step: int, num_layers: int, shards: tuple) -> Manifest:
    return Manifest(
        version=MANIFEST_VERSION,
        name=checkpoint_name(RUN, step=step, generation=1),
        tag="kill",
        run=RUN,
        saved_at=f"2026-01-01T00:00:00.{step:06d}+00:00",
        step=step,
        generation=1,
        loss=1.0,
        seed=0,
        global_batch_size=1,
        samples_seen=step,
        data_digest="",
        layer_names=tuple(f"layer{layer}" for layer in range(num_layers)),
        shards=shards,
    )


def be_worker(directory: Path, step: int, num_layers: int, pause_s: float, to_agent: int) -> None:
    """Save, with pauses that may be too short for the disk; note what is whole in memory, and tell the agent of it."""
    progress = os.open(directory / "sealed", os.O_WRONLY | os.O_CREAT, 0o600)

    def report(saved: StateSaved | StateNotSaved) -> None:
        if isinstance(saved, StateSaved):
            os.pwrite(progress, struct.pack("<Q", saved.state.step), 0)
            os.write(to_agent, struct.pack("<Q", saved.state.step))

    saver = FlashSaver(directory / "memory", STEM, metadata={"config": "{}"}, report=report)
    while True:
        name = checkpoint_name(RUN, step=step, generation=1)
        saver.save(state_after(step, num_layers), name=name, step=step, generation=1)
        time.sleep(pause_s)
        step += 1


def be_agent(directory: Path, num_layers: int, from_worker: int) -> None:
    """Write every state to disk that is still there when its turn comes; keep two."""
    checkpoints = CheckpointDirectory(directory / "disk")
    progress = os.open(directory / "persisted", os.O_WRONLY | os.O_CREAT, 0o600)
    while message := os.read(from_worker, 1 << 16):
        (step,) = struct.unpack("<Q", message[-8:])
        name = checkpoint_name(RUN, step=step, generation=1)
        for slot in find_slots(directory / "memory", STEM):
            if name.encode() in slot.note:
                if persist(checkpoints, step, num_layers, slot):
                    os.pwrite(progress, struct.pack("<Q", step), 0)
                break


def persist(checkpoints: CheckpointDirectory, step: int, num_layers: int, slot: Slot) -> bool:
    """Write a state and commit it; False when it was written over meanwhile."""
    try:
        shards = checkpoints.persist(checkpoint_name(RUN, step=step, generation=1), slot)
    except CorruptCheckpoint:
        return False
    checkpoints.commit(manifest_of(step, num_layers, shards))
    complete = [found.name for found in checkpoints.find() if found.manifest]
    checkpoints.remove(other for other in checkpoints.names() if other not in complete[:2])
    return True


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        directory, step, num_layers, pause_s = line.split()
        ours, theirs = os.pipe()
        worker = os.fork()
        if worker == 0:
            torch.set_num_threads(1)
            be_worker(Path(directory), int(step), int(num_layers), float(pause_s), theirs)
        agent = os.fork()
        if agent == 0:
            os.close(theirs)
            be_agent(Path(directory), int(num_layers), ours)
            os._exit(0)
        os.close(ours)
        os.close(theirs)
        print(worker, agent, flush=True)


if __name__ == "__main__":
    main()
