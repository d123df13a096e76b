"""A script of which a step has a bad loss, for one of several reasons.

`bad_script.py OUT STEPS WHY`: in step 12 the loss of a rank is not a number, because of its `data` (rank 1's), or of
its `node` (node1), or of a `flash` that strikes node1 once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import oobleck.checkpoint

out, steps, why = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
is_on_node1 = "node1" in os.environ["OOBLECK_CHECKPOINT_MEMORY"]
state: Any = oobleck.checkpoint.load()
step, weights = (state["step"], state["weights"]) if state is not None else (0, torch.zeros(10))
assert weights.isfinite().all()
with open(f"{out}/log.{rank}", "a", encoding="utf-8") as log:
    while step < steps:
        step += 1
        own = torch.ones(1)
        if (
            step == 12
            and {
                "data": rank == 1,
                "node": is_on_node1,
                "flash": is_on_node1 and not Path(out, "struck").exists(),
            }[why]
        ):
            Path(out, "struck").touch()
            own *= float("nan")
        loss = own.item()
        dist.all_reduce(own)
        weights += own / dist.get_world_size()
        oobleck.checkpoint.save(step, {"step": step, "weights": weights}, loss=loss, on_bad_step="redo")
        said = {"step": step, "restarts": restarts, "pid": os.getpid(), "on_node1": is_on_node1}
        log.write(json.dumps(said) + "\n")
        log.flush()
dist.destroy_process_group()
