"""An FSDP2 script that saves after every step, and notes its losses; the batch of a step is the same on any ranks.

`fsdp_script.py OUT STEPS SECONDS_A_STEP`. All values are float64, so that sums in another order differ by 1e-12.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import oobleck.checkpoint

BATCH = 24

out, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 48), torch.nn.Tanh(), torch.nn.Linear(48, 20)).double()
mesh = dist.init_device_mesh("cpu", (world,))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state: Any = oobleck.checkpoint.load()
step = 0
if state is not None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
with open(f"{out}/log.{rank}", "a", encoding="utf-8") as log:
    while step < steps:
        inputs = torch.randn(BATCH, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs[rank::world]) - inputs[rank::world]).square().sum() / (BATCH * 20) * world
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / world
        dist.all_reduce(total)
        step += 1
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        oobleck.checkpoint.save(step, saved, disk_every=10**6)
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        log.write(
            json.dumps({"step": step, "loss": float(total), "restarts": restarts, "pid": os.getpid(), "world": world})
            + "\n"
        )
        log.flush()
        time.sleep(pause_s)
dist.destroy_process_group()
