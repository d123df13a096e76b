"""How long saving keeps training waiting, and how fast a state comes back: flash checkpoints beside torch's own.

    python tools/bench/checkpoint.py --mib 1024 --saves 5

One process, one state of float32 tensors in the shapes of a transformer with AdamW. For every way of saving: the
pause, in which the training thread can do nothing else; how long until the state is on the disk; and how long it
takes to load. Flash checkpoints are copied while the next step is computed: the pause is what its thread waits, with
matrix products for a step; how much longer these take than without a save is told as well. "At once" is a save that
has no step to hide in. `torch.save` and `torch.distributed.checkpoint` are forced to the disk as ours is, in their
background where they have one. All run in turns, on the same disk; medians count. Memory is read and written once
before, as memcpy.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in torch's stubs
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import async_save

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.control.protocol import Shard, StateNotSaved, StateSaved
from oobleck.storage import MANIFEST_VERSION, CheckpointDirectory, Manifest, checkpoint_name, find_slots
from oobleck.training.checkpoint import FlashSaver, LayerTensors, StateReader, digest_of
from tools.smoke import parse_arguments

_STEM = "device0"
_RUN = "0123abcd"
_STEP_COPIES = 6
"""A step's computation is so many times as long as a copy of the state."""


@dataclass(slots=True)
class Times:
    """Of one way of saving, in seconds, in the order of the saves."""

    pause_s: list[float] = field(default_factory=list)
    slowed_s: list[float] = field(default_factory=list)
    """What the step beside the save took longer."""
    on_disk_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)


def main() -> None:
    """Run everything in turns and print a table."""
    options = _parse()
    torch.set_num_threads(options.threads)
    layers = _state(options.mib, options.hidden)
    size = sum(tensor.nbytes for tensors in layers.values() for tensor in tensors.values())
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-bench", dir=options.directory))
    shared = Path(tempfile.mkdtemp(prefix="checkpoint-bench", dir="/dev/shm"))
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        copies_s, ways = _measure(layers, directory, shared, options)
    finally:
        torch.distributed.destroy_process_group()
        shutil.rmtree(directory)
        shutil.rmtree(shared)
    _report(size, copies_s, ways)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the blocks that it consists of")
    parser.add_argument("--saves", type=int, default=5, help="saves of each kind")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--directory", default=None, help="where to save; by default the temporary directory")
    return parse_arguments(parser, mib=1, hidden=64, saves=1)


def _state(mib: int, hidden: int) -> LayerTensors:
    """Transformer blocks of 12·hidden² parameters, each with two moments, until the size is reached."""
    block_bytes = 3 * 12 * hidden**2 * 4
    shapes = {"attn.qkv": (3, 1), "attn.out": (1, 1), "mlp.up": (4, 1), "mlp.down": (1, 4)}
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for layer in range(max(1, round(mib * 2**20 / block_bytes))):
        layers[layer] = {}
        for name, (rows, columns) in shapes.items():
            for kind in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
                layers[layer][f"{kind}h.{layer}.{name}"] = torch.randn(rows * hidden, columns * hidden)
        layers[layer][f"h.{layer}.norm"] = torch.randn(hidden)
    return layers


def _measure(
    layers: LayerTensors, directory: Path, shared: Path, options: argparse.Namespace
) -> tuple[list[float], dict[str, Times]]:
    plain, distributed = _Plain(layers, directory), _Distributed(layers, directory)
    copies_s: list[float] = []
    digests_s = [
        _timed(lambda: digest_of(tensor for part in layers.values() for tensor in part.values())) for _ in "123"
    ]
    flat = torch.cat([tensor.reshape(-1) for tensors in layers.values() for tensor in tensors.values()])
    target = torch.zeros_like(flat)
    copy_s = statistics.median(_timed(lambda: target.copy_(flat)) for _ in "123")
    step = _Step(_STEP_COPIES * copy_s, options.hidden)
    flash = _Flash(layers, directory, shared, step)
    for _ in range(4):  # the steps before the first save, in which the memory is made
        step.compute()
    for number in range(1, options.saves + 1):
        copies_s.append(_timed(lambda: target.copy_(flat)))
        flash.save(2 * number - 1, at_once=False)
        flash.save(2 * number, at_once=True)
        plain.save()
        distributed.save(number)
    for _ in range(3):
        flash.load()
        plain.load()
        distributed.load()
    print(f"digest of the state: {statistics.median(digests_s):.3f} s; a hundredth of it a step")
    return copies_s, {
        "flash": flash.times,
        "flash, at once": flash.at_once_times,
        "flash, from disk": flash.disk_times,
        "torch.save": plain.times,
        "dcp.async_save": distributed.times,
    }


class _Step:
    """Computation of a given length, as a step's forward and backward passes."""

    def __init__(self, length_s: float, hidden: int) -> None:
        self._matrix = torch.randn(hidden, hidden)
        once_s = statistics.median(_timed(lambda: self._matrix @ self._matrix) for _ in range(20))
        self._count = math.ceil(length_s / once_s)
        self.usual_s = statistics.median(_timed(self.compute) for _ in "12345")

    def compute(self) -> None:
        for _ in range(self._count):
            self._matrix @ self._matrix


class _Flash:
    """Ours: shared memory, then one file a layer."""

    def __init__(self, layers: LayerTensors, directory: Path, shared: Path, step: _Step) -> None:
        self.times, self.at_once_times, self.disk_times = Times(), Times(), Times()
        self._step = step
        self._layers = layers
        self._shared = shared
        self._directory = CheckpointDirectory(directory / "flash")
        self._done = threading.Event()
        self._name = ""
        self._saver = FlashSaver(shared, _STEM, metadata={}, report=self._note)
        self._saver.prepare(layers)

    def save(self, step: int, *, at_once: bool) -> None:
        times = self.at_once_times if at_once else self.times
        self._name = checkpoint_name(_RUN, step=step, generation=1)
        self._done.clear()
        began_s = time.monotonic()
        pause_s = _timed(lambda: self._saver.save(self._layers, name=self._name, step=step, generation=1))
        if not at_once:
            times.slowed_s.append(_timed(self._step.compute) - self._step.usual_s)
        times.pause_s.append(pause_s + _timed(self._saver.settle))
        self._done.wait()
        slot = next(slot for slot in find_slots(self._shared, _STEM) if self._name.encode() in slot.note)
        shards = self._directory.persist(self._name, slot)
        self._directory.commit(self._manifest(step, shards))
        times.on_disk_s.append(time.monotonic() - began_s)
        self._directory.remove(name for name in self._directory.names() if name != self._name)

    def load(self) -> None:
        nowhere = self._shared / "nowhere"
        for times, memory in ((self.times, self._shared), (self.disk_times, nowhere)):
            forget_pages(self._directory.path)
            reader = StateReader(memory, _STEM, self._directory)
            times.load_s.append(_timed(partial(self._restore, reader)))

    def _restore(self, reader: StateReader) -> None:
        for layer, tensors in self._layers.items():
            loaded = reader.load(self._name, layer)
            for name, tensor in tensors.items():
                tensor.copy_(loaded[name])

    def _note(self, saved: StateSaved | StateNotSaved) -> None:
        assert isinstance(saved, StateSaved), saved
        self._done.set()

    def _manifest(self, step: int, shards: tuple[Shard, ...]) -> Manifest:
        return Manifest(
            version=MANIFEST_VERSION,
            name=self._name,
            tag="bench",
            run=_RUN,
            saved_at=f"2026-01-01T00:{step // 60:02d}:{step % 60:02d}",
            step=step,
            generation=1,
            loss=0.0,
            seed=0,
            global_batch_size=1,
            samples_seen=step,
            data_digest="",
            layer_names=tuple(f"h.{layer}" for layer in self._layers),
            shards=shards,
        )


class _Plain:
    """torch.save to one file."""

    def __init__(self, layers: LayerTensors, directory: Path) -> None:
        self.times = Times()
        self._layers = layers
        self._path = directory / "plain.pt"

    def save(self) -> None:
        began_s = time.monotonic()
        temporary = self._path.with_suffix(".tmp")
        self.times.pause_s.append(_timed(lambda: torch.save(dict(self._layers), temporary)))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.rename(self._path)
        self.times.on_disk_s.append(time.monotonic() - began_s)

    def load(self) -> None:
        forget_pages(self._path)
        self.times.load_s.append(_timed(self._restore))

    def _restore(self) -> None:
        loaded = torch.load(self._path, weights_only=True)
        for layer, tensors in self._layers.items():
            for name, tensor in tensors.items():
                tensor.copy_(loaded[layer][name])


class _Distributed:
    """torch.distributed.checkpoint.async_save, which copies first and writes in a thread."""

    def __init__(self, layers: LayerTensors, directory: Path) -> None:
        self.times = Times()
        self._state = {name: tensor for tensors in layers.values() for name, tensor in tensors.items()}
        self._directory = directory
        self._path = directory / "dcp"

    def save(self, number: int) -> None:
        path = self._directory / f"dcp{number}"
        began_s = time.monotonic()
        writer = FileSystemWriter(path)
        futures: list[Any] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.times.pause_s.append(_timed(lambda: futures.append(async_save(self._state, storage_writer=writer))))
        futures[0].result()
        self.times.on_disk_s.append(time.monotonic() - began_s)
        shutil.rmtree(self._path, ignore_errors=True)
        self._path = path

    def load(self) -> None:
        forget_pages(self._path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = FileSystemReader(self._path)
            self.times.load_s.append(_timed(lambda: load_distributed(self._state, storage_reader=reader)))


def _timed(act: Callable[[], object]) -> float:
    began_s = time.monotonic()
    act()
    return time.monotonic() - began_s


def forget_pages(path: Path) -> None:
    """Have files read from the disk, not from the system's cache."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _report(size: int, copies_s: list[float], ways: dict[str, Times]) -> None:
    mib = size / 2**20
    copy_s = statistics.median(copies_s[1:] or copies_s)
    print(f"state of {mib:.0f} MiB; memcpy {mib / 1024 / copy_s:.2f} GiB/s")
    print(f"{'':18}{'pause s':>10}{'first':>10}{'slowed s':>10}{'on disk s':>12}{'load s':>10}")
    for name, times in ways.items():
        columns = (times.pause_s, times.pause_s[:1], times.slowed_s, times.on_disk_s, times.load_s)
        texts = [f"{statistics.median(part):.3f}" if part else "" for part in columns]
        print(f"{name:18}{texts[0]:>10}{texts[1]:>10}{texts[2]:>10}{texts[3]:>12}{texts[4]:>10}")
    flash, slowed_s = ways["flash"].pause_s, ways["flash"].slowed_s
    at_once_s = statistics.median(ways["flash, at once"].pause_s)
    pause_s = statistics.median(flash)
    cost_s = statistics.median(pause + slowed for pause, slowed in zip(flash, slowed_s, strict=True))
    print(f"copy rate against memcpy, at once: {copy_s / at_once_s:.2f} (wanted: at least 0.7)")
    print(f"first save against a copy at once: {flash[0] / at_once_s:.2f} (wanted: at most 2)")
    for name, wanted in (("torch.save", 0.1), ("dcp.async_save", 1.0)):
        other_s = statistics.median(ways[name].pause_s)
        print(f"pause against {name}: {pause_s / other_s:.3f} (wanted: at most {wanted})")
        print(f"    slowing counted in: {cost_s / other_s:.3f}; copied at once: {at_once_s / other_s:.3f}")


if __name__ == "__main__":
    main()
