"""A script for torchrun, as it is: data-parallel training that saves, and continues from what it has saved.

oobleck run --local 4 examples/ddp.py
torchrun --nproc-per-node 4 examples/ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--saved", default="ddp-saved.pt")
arguments = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32)).to(device)
trained = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)

step = 0
if os.path.exists(arguments.saved):
    saved = torch.load(arguments.saved, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    print(f"rank {dist.get_rank()} continues after step {step}")

while step < arguments.steps:
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
    inputs = torch.randn(64, 32, device=device)
    loss = (trained(inputs) - inputs.roll(1, dims=1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{arguments.saved}.tmp")
        os.replace(f"{arguments.saved}.tmp", arguments.saved)
dist.destroy_process_group()
