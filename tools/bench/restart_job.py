"""What `restart.py` runs: a script as people have them for torchrun, with DDP on Gloo and a checkpoint of its own.

With the word `flash` as its second argument, it saves after every step by `oobleck.checkpoint` in place of that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import oobleck.checkpoint


def main() -> None:
    """Train until killed; each rank writes a line for each step."""
    directory, is_flash = Path(sys.argv[1]), sys.argv[2:] == ["flash"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = directory / "checkpoint.pt"
    step = 0
    state: Any = None
    if is_flash:
        state = oobleck.checkpoint.load()
    elif checkpoint.exists():
        state = torch.load(checkpoint)
    if state is not None:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with (directory / f"rank{rank}.jsonl").open("a", encoding="utf-8") as log:
        while True:
            inputs = torch.randn(16, 128)
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if is_flash:
                oobleck.checkpoint.save(step, state)
            said = {"step": step, "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
            log.write(json.dumps({**said, "pid": os.getpid(), "world": dist.get_world_size(), "t": time.time()}) + "\n")
            log.flush()
            if not is_flash and rank == 0 and step % 5 == 0:
                torch.save(state, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)
            time.sleep(0.05)


if __name__ == "__main__":
    main()
