"""What `restart.py` runs: a script as people have them for torchrun, with DDP on Gloo and a checkpoint of its own.

With a word as its second argument, it saves in place of that after every step by `oobleck.checkpoint` (`flash`), also
with ranks that keep their processes (`attempts`), or every five steps by torch's distributed checkpoints (`dcp`).
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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

import oobleck
import oobleck.checkpoint


def main() -> None:
    """Train until killed; each rank writes a line for each step."""
    how = (*sys.argv[2:], "itself")[0]
    (oobleck.resilient(train) if how == "attempts" else train)(Path(sys.argv[1]), how)


def train(directory: Path, how: str) -> None:
    """Go on from the newest saved state."""
    is_flash = how in ("flash", "attempts")
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
    elif how == "dcp" and (directory / "dcp").exists():
        step = _load_by_dcp(directory / "dcp", model, optimizer)
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
            if how == "dcp" and step % 5 == 0:
                save(state, checkpoint_id=directory / f"dcp-{step}")
                if rank == 0:
                    (link := directory / "dcp.new").symlink_to(f"dcp-{step}")
                    os.replace(link, directory / "dcp")
            elif how == "itself" and rank == 0 and step % 5 == 0:
                torch.save(state, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)
            time.sleep(0.05)


def _load_by_dcp(directory: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> int:
    # It loads into tensors that exist; an optimizer makes its own in its first step.
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    optimizer.zero_grad()
    state: dict[str, Any] = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    load(state, checkpoint_id=directory)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
