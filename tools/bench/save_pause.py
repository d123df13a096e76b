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
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.storage import find_slots
from tools.bench.pause_peers_job import make_state, timed
from tools.smoke import parse_arguments


def main() -> None:
    """Measure in turns, and print the medians."""
    options = _parse()
    copies_s, saves_s, summed_s = measure(options.mib, options.saves)
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


def measure(mib: int, saves: int) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of copies, of saves, and of saves with their checksums."""
    torch.set_num_threads(1)
    memory = Path(tempfile.mkdtemp(prefix="save-pause", dir="/dev/shm"))
    os.environ |= {"OOBLECK_CHECKPOINT_MEMORY": str(memory), "OOBLECK_CHECKPOINT_DIR": str(memory / "disk")}
    try:
        return _in_turns(mib, saves, memory)
    finally:
        shutil.rmtree(memory)


def _in_turns(mib: int, saves: int, memory: Path) -> tuple[list[float], list[float], list[float]]:
    from oobleck.checkpoint import save  # once the environment says where

    state, copy = make_state(mib)
    for step in range(3):  # makes the memory, and writes both slots once
        save(step, state, disk_every=10**9)
    copies_s, saves_s, summed_s = [], [], []
    for turn in range(saves):
        copies_s.append(timed(copy))
        save_once = partial(save, state=state, disk_every=10**9)
        saves_s.append(timed(partial(save_once, 3 + 2 * turn)))
        summed_s.append(timed(partial(save_once, 4 + 2 * turn)) + timed(partial(_sum_newest, memory)))
    return copies_s, saves_s, summed_s


def _sum_newest(memory: Path) -> None:
    max(find_slots(memory, "rank0"), key=lambda slot: slot.sequence).sum()


if __name__ == "__main__":
    main()
