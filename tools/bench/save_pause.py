"""How long `oobleck.checkpoint.save` keeps a script waiting, against a copy of the same bytes.

    python tools/bench/save_pause.py --mib 256 --saves 7

One process, one state of float32 tensors, saved into shared memory. In turns: a copy into memory that was written
before (memcpy); a save; and a save whose checksums are computed before it returns, as if no agent did that later.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.storage import find_slots
from tools.smoke import parse_arguments

_TENSOR_BYTES = 16 << 20


def main() -> None:
    """Measure in turns, and print the medians."""
    options = _parse()
    torch.set_num_threads(1)
    memory = Path(tempfile.mkdtemp(prefix="save-pause", dir="/dev/shm"))
    os.environ |= {"OOBLECK_CHECKPOINT_MEMORY": str(memory), "OOBLECK_CHECKPOINT_DIR": str(memory / "disk")}
    try:
        copies_s, saves_s, summed_s = _measure(options, memory)
    finally:
        shutil.rmtree(memory)
    copy_s = statistics.median(copies_s)
    print(f"state of {options.mib} MiB; memcpy {options.mib / 1024 / copy_s:.2f} GiB/s, {options.saves} turns")
    for name, times_s in (("save", saves_s), ("save, with checksums", summed_s)):
        pause_s = statistics.median(times_s)
        print(f"{name}: {pause_s * 1e3:.1f} ms, {pause_s / copy_s:.2f} of memcpy")
    print("wanted: save at most 1.3 of memcpy")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--saves", type=int, default=7, help="saves of each kind")
    return parse_arguments(parser, mib=1, saves=1)


def _measure(options: argparse.Namespace, memory: Path) -> tuple[list[float], list[float], list[float]]:
    from oobleck.checkpoint import save  # once the environment says where

    size = options.mib << 20
    sizes = [min(_TENSOR_BYTES, size - start) for start in range(0, size, _TENSOR_BYTES)]
    state = {str(number): torch.randn(each // 4) for number, each in enumerate(sizes)}
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for step in range(3):  # makes the memory, and writes both slots once
        save(step, state, disk_every=10**9)
    copies_s, saves_s, summed_s = [], [], []
    for turn in range(options.saves):
        copies_s.append(_timed(lambda: [targets[name].copy_(tensor) for name, tensor in state.items()]))
        save_once = partial(save, state=state, disk_every=10**9)
        saves_s.append(_timed(partial(save_once, 3 + 2 * turn)))
        summed_s.append(_timed(partial(save_once, 4 + 2 * turn)) + _timed(partial(_sum_newest, memory)))
    return copies_s, saves_s, summed_s


def _sum_newest(memory: Path) -> None:
    max(find_slots(memory, "rank0"), key=lambda slot: slot.sequence).sum()


def _timed(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
