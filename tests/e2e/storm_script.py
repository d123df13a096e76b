"""A script that saves after every step, whose result tells whether each step was taken once and in order.

`storm_script.py OUT STEPS SECONDS_A_STEP`. Each rank notes where it begins, and each step once it has saved it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import oobleck.checkpoint

out, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
state: Any = oobleck.checkpoint.load()
step, chain = (state["step"], state["chain"]) if state is not None else (0, torch.ones(64, dtype=torch.int64))
start = {"run": os.environ["STORM_RUN"], "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "world": world}


def note(kind: str, value: object) -> None:
    line = json.dumps({**start, "rank": rank, kind: value}) + "\n"
    os.write(log, line.encode())


log = os.open(f"{out}/log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
note("begins", step)
while step < steps:
    sum_of_steps = torch.full((1,), step + 1, dtype=torch.int64)
    dist.all_reduce(sum_of_steps)
    step += 1
    chain = (chain * 31 + sum_of_steps // world) % 1_000_003
    oobleck.checkpoint.save(step, {"step": step, "chain": chain}, disk_every=20)
    note("saved", step)
    time.sleep(pause_s)
note("result", chain.tolist())
dist.destroy_process_group()
