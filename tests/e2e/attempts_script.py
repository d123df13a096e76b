"""A script whose ranks keep their processes: DDP, FSDP2, HSDP, or tensor parallelism with FSDP2; it notes its losses.

`attempts_script.py KIND OUT STEPS SECONDS_A_STEP`. It saves after every step. The batch of a step is the same on any
number of ranks. All values are float64, so that sums in another order differ by 1e-12. Each loss comes with a check
value: one that is wrong shows that a collective gave a number although a rank was gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import oobleck
import oobleck.checkpoint

BATCH = 24

kind, out, steps, pause_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(0)


def build(world: int) -> tuple[torch.nn.Module, int, int]:
    """The model, and this rank's number and the number of parts that a batch is cut into."""
    rank = dist.get_rank()
    model: Any = torch.nn.Sequential(torch.nn.Linear(20, 48), torch.nn.Tanh(), torch.nn.Linear(48, 20)).double()
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.01), rank, world
    if kind == "fsdp":
        mesh = dist.init_device_mesh("cpu", (world,))
    elif kind == "hsdp":
        mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        both = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = both["dp"]
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return (model, both["dp"].get_local_rank(), world // 2) if kind == "tp" else (model, rank, world)


@oobleck.resilient
def train() -> int:
    """Take all steps; return the last one's number."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    model, part, parts = build(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: Any = oobleck.checkpoint.load()
    step = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with open(f"{out}/log.{dist.get_rank()}", "a", encoding="utf-8") as log:
        while step < steps:
            inputs = torch.randn(BATCH, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            mine = inputs[part::parts]
            loss = (model(mine) - mine).square().sum() / (BATCH * 20) * parts
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            check = torch.tensor([float(loss.detach()) / world, step + 1.0], dtype=torch.float64)
            dist.all_reduce(check)
            step += 1
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            oobleck.checkpoint.save(step, saved, disk_every=10**6)
            note = {"step": step, "loss": float(check[0]), "restarts": restarts, "pid": os.getpid(), "world": world}
            counts = {
                "is_exact": float(check[1]) == world * step,
                "t": time.time(),
                "fds": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
                "tasks": len(os.listdir("/proc/self/task")),
                "rss": int(open("/proc/self/statm").read().split()[1]) * 4096,  # noqa: SIM115
            }
            log.write(json.dumps(note | counts) + "\n")
            log.flush()
            time.sleep(pause_s)
    dist.destroy_process_group()
    return step


assert train() == steps
