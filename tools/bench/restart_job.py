"""What `restart.py` runs: a script as people have them for torchrun, with DDP on Gloo and a checkpoint of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train until killed; each rank writes a line for each step."""
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = directory / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
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
            said = {"step": step, "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
            log.write(json.dumps({**said, "pid": os.getpid(), "world": dist.get_world_size(), "t": time.time()}) + "\n")
            log.flush()
            if rank == 0 and step % 5 == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)
            time.sleep(0.05)


if __name__ == "__main__":
    main()
