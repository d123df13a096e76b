"""A script whose model is sharded over a mesh of two dimensions, and that saves by torch's DCP after every step.

`dcp_script.py OUT STEPS`: all ranks take the same batches, so that losses do not depend on their number. An even number
of ranks is a mesh of two rows; any other is one row.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import oobleck.dcp

out, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 10))
rows = 2 if world % 2 == 0 else 1
mesh = init_device_mesh("cpu", (rows, world // rows), mesh_dim_names=("copies", "shards"))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
reader, step = oobleck.dcp.Reader(), 0
if reader.step is not None:
    step = reader.step
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()  # so that there are states to load into
    optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
with open(f"{out}/log.{rank}", "a", encoding="utf-8") as log:
    while step < steps:
        step += 1
        inputs = torch.randn(4, 10, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, storage_writer=oobleck.dcp.Writer(step, disk_every=10**9))
        said = {"step": step, "loss": loss.item(), "world": world, "pid": os.getpid()}
        log.write(json.dumps({**said, "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}) + "\n")
        log.flush()
dist.destroy_process_group()
