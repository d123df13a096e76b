"""What `pause_peers.py` runs with an interpreter that has the peers: one way of saving, in turns with a plain copy.

    pause_peers_job.py WAY DIRECTORY MIB SAVES    prints the seconds of the copies and of the saves, as JSON

Nothing here imports Oobleck. `save_pause.py` makes its state here too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_c10d: Any = dist  # its stubs export no stores
_TENSOR_BYTES = 16 << 20

State = dict[str, torch.Tensor]
Save = Callable[[int, State], object]


def make_state(mib: int) -> tuple[State, Callable[[], object]]:
    """Make tensors of `mib` MiB, and what copies them into memory that was written before."""
    size = mib << 20
    sizes = [min(_TENSOR_BYTES, size - start) for start in range(0, size, _TENSOR_BYTES)]
    state = {str(number): torch.randn(each // 4) for number, each in enumerate(sizes)}
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    return state, lambda: [targets[name].copy_(tensor) for name, tensor in state.items()]


def timed(act: Callable[[], object]) -> float:
    """The seconds that something takes."""
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


# --- ways: what saves, and what then waits for all that it has left to its background --------------------------------


def save_by_torch(directory: Path) -> tuple[Save, Callable[[], object]]:
    """One file, the same each time."""
    return lambda _, state: torch.save(state, directory / "state.pt"), lambda: None


def save_by_dcp(directory: Path) -> tuple[Save, Callable[[], object]]:
    """A folder of files, as it is by default."""
    from torch.distributed.checkpoint.state_dict_saver import save

    path = directory / "dcp"
    return lambda _, state: save(state, checkpoint_id=path), lambda: shutil.rmtree(path)


def save_by_async_dcp(directory: Path) -> tuple[Save, Callable[[], object]]:
    """The same, written by a thread."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    path = directory / "dcp"
    writes: list[Any] = []

    def settle() -> None:
        writes.pop().result()
        shutil.rmtree(path)

    return lambda _, state: writes.append(async_save(state, checkpoint_id=path)), settle


def save_by_lm_resiliency(directory: Path) -> tuple[Save, Callable[[], object]]:
    """Its GEMINI, as its optimizer's hook calls it: a copy here, and one in the other rank's memory behind it."""
    from lm_resiliency import InMemoryCkptConfig
    from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

    manager = InMemoryCheckpointManager(InMemoryCkptConfig(disk_flush_interval=0, disk_folder=str(directory / "disk")))

    def settle() -> None:
        assert manager.finalize_replication(), "the other rank has no copy"

    return lambda step, state: manager.save(state, step), settle


def save_by_dlrover(directory: Path) -> tuple[Save, Callable[[], object]]:
    """Shared memory; without its launcher, it starts the process that would write from there."""
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    checkpointer = DdpCheckpointer(str(directory / "dlrover"))
    return lambda step, state: checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY), lambda: None


def save_by_nvrx(directory: Path) -> tuple[Save, Callable[[], object]]:
    """Its torch.save in another process."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    saver = TorchAsyncCheckpoint()
    path = directory / "state.pt"
    return lambda _, state: saver.async_save(state, path), lambda: saver.finalize_async_save(blocking=True)


_WAYS = {
    "torch": save_by_torch,
    "dcp": save_by_dcp,
    "async-dcp": save_by_async_dcp,
    "lm-resiliency": save_by_lm_resiliency,
    "dlrover": save_by_dlrover,
    "nvrx": save_by_nvrx,
}


def main() -> None:
    """Measure one way."""
    way, directory, mib, saves = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    world = 2 if way == "lm-resiliency" else 1
    if rank + 1 < world:
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(rank + 1)})
    dist.init_process_group("gloo", store=_c10d.FileStore(str(directory / "store"), world), rank=rank, world_size=world)
    save, settle = _WAYS[way](directory)
    state, copy = make_state(mib)
    copies_s, saves_s = [], []
    for step in range(1, 4 + saves):  # the first three make the memory, and write it once
        copies_s.append(timed(copy))
        saves_s.append(timed(partial(save, step, state)))
        settle()
    if rank == 0:
        print(json.dumps([copies_s[3:], saves_s[3:]]), flush=True)


if __name__ == "__main__":
    main()
