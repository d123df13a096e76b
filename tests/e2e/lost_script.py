"""A script whose three ranks all wait, each in another call, because rank 2 takes a wrong turn: once.

`lost_script.py OUT`
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
two = dist.new_group([1, 2])
for step in range(5):
    print("step", step, flush=True)
    dist.all_reduce(torch.ones(1))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == 2:
        dist.recv(torch.ones(1), 0)
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=two)
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
