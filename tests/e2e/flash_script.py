"""A script that saves after every step, and notes which steps it has saved; it may lose its way once, for good.

`flash_script.py OUT STEPS [SECONDS_A_STEP [HANGS]]`: with HANGS, the last rank sleeps in its tenth step if it is the
first start, and the others wait for it. With GROW in the environment, every state is larger than the one before; with
LOAD_PAUSE_S, the third start and later ones wait so many seconds before they load.
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


def load_batch() -> None:
    time.sleep(600)


out, steps = sys.argv[1], int(sys.argv[2])
pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.01
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if restarts > 1:
    time.sleep(float(os.environ.get("LOAD_PAUSE_S", "0")))
state: Any = oobleck.checkpoint.load()
step, weights = (state["step"], state["weights"]) if state is not None else (0, torch.zeros(1000))
assert weights.eq(step).all(), "no state is torn"
with open(f"{out}/log.{rank}", "a", encoding="utf-8") as log:
    while step < steps:
        if len(sys.argv) > 4 and restarts == 0 and step == 9 and rank == world - 1:
            load_batch()
        total = torch.ones(1)
        dist.all_reduce(total)
        weights += total / world
        step += 1
        grown = {"steps": torch.arange(step)} if "GROW" in os.environ else {}
        oobleck.checkpoint.save(step, {"step": step, "weights": weights, **grown}, loss=1 / step, disk_every=50)
        said = {"step": step, "restarts": restarts, "pid": os.getpid(), "world": world}
        log.write(json.dumps(said) + "\n")
        log.flush()
        if rank == 0:
            print(f"step {step}")
        time.sleep(pause_s)
dist.destroy_process_group()
