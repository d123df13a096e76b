"""A script for torchrun that saves in memory after every step: `oobleck.checkpoint` in place of files of its own.

oobleck run --local 4 examples/ddp_flash.py
torchrun --nproc-per-node 4 examples/ddp_flash.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import oobleck.checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
arguments = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32)).to(device)
trained = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)

step = 0
state = oobleck.checkpoint.load()
if state is not None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    print(f"rank {dist.get_rank()} continues after step {step}")

while step < arguments.steps:
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
    inputs = torch.randn(64, 32, device=device)
    loss = (trained(inputs) - inputs.roll(1, dims=1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    oobleck.checkpoint.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
