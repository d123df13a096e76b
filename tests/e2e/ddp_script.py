"""A script as people have them for torchrun: DDP on Gloo, a checkpoint of its own, a log of its steps. Unmodified."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

out, steps = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"])


def note(**what):
    with open(f"{out}/log.{rank}", "a") as file:
        said = {"t": time.time(), "pid": os.getpid(), "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), **what}
        file.write(json.dumps(said) + "\n")


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 16, dtype=torch.float64))
optimizer = torch.optim.AdamW(model.parameters())
step = 0
if os.path.exists(f"{out}/saved.pt"):
    saved = torch.load(f"{out}/saved.pt")
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < steps:
    torch.manual_seed(step)
    inputs = torch.randn(8, 16, dtype=torch.float64)
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    note(step=step, loss=loss.item(), world=dist.get_world_size())
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{out}/saved.tmp")
        os.replace(f"{out}/saved.tmp", f"{out}/saved.pt")
        print(f"step {step}")
    time.sleep(0.05)
dist.destroy_process_group()
