"""A model under FSDP2 that trains some steps, saves each, and prints what its whole state comes to before and after."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import oobleck.checkpoint


def total(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A sum that differs where any element has another place or value."""
    tensors: list[Any] = [*model.parameters(), *(value["exp_avg"] for value in optimizer.state.values())]
    wholes = [tensor.detach().full_tensor().flatten() for tensor in tensors]
    return str(float(sum((whole.double() * torch.arange(1, len(whole) + 1)).sum() for whole in wholes)))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5))
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state: Any = oobleck.checkpoint.load()
step = 0
if state is not None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
print(total(model, optimizer) if state is not None else "")
for _ in range(3):
    model(torch.randn(16, 10)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    oobleck.checkpoint.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
print(total(model, optimizer))
dist.destroy_process_group()
