"""The baseline of `recovery.py`: data-parallel training under torchrun, with a checkpoint each step.

Each restart rendezvouses in a store of its own: torchrun's own keeps the dead generation's addresses, and Gloo
would connect to those.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in torch's stubs
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    """Train until killed; rank 0 writes a line for each step."""
    directory = Path(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    store = FileStore(str(directory / f"store{restart}-{os.environ['TORCHELASTIC_RUN_ID']}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    model = torch.nn.parallel.DistributedDataParallel(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = directory / "checkpoint.pt"
    step = 0
    if restart and checkpoint.exists():
        state = torch.load(checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    pids: list[object] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    while True:
        step += 1
        batch = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(1000 * step + rank))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
            with (directory / "torchrun.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps({"step": step, "restart": restart, "pids": pids}) + "\n")
        dist.barrier()


if __name__ == "__main__":
    main()
