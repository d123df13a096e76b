"""Ranks that lose their groups again and again, in the same processes: what they leave behind, and what they are given.

`lossy_script.py KIND LOSSES` plays the agent of two ranks. Each interrupts them while collectives are under way, at
random times. It prints, as JSON, the collectives that gave a wrong number, and each rank's descriptors, threads and
resident bytes in each attempt.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from oobleck.control.protocol import BecomeRank, InterruptRank
from oobleck.training.attempts import Line, attempts, set_line
from oobleck.wire import encode_frame

NUM_RANKS = 2


def train(kind: str, tell: socket.socket) -> None:
    """Take steps until interrupted; tell what the first ones leave open, and of each wrong sum."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (NUM_RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    while True:
        step += 1
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        total = torch.full((5000,), float(step * (rank + 1)))
        dist.all_reduce(total)
        if not total.eq(step * NUM_RANKS * (NUM_RANKS + 1) / 2).all():
            tell.send(b'{"wrong": 1}')
        if step == 3:
            with open("/proc/self/statm", encoding="utf-8") as statm:
                resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            counts = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident
            tell.send(json.dumps({"counts": counts}).encode())


def run_rank(line: socket.socket, tell: socket.socket, rank: int, kind: str) -> None:
    """Be a rank until killed."""

    def enter(order: BecomeRank, overflow: socket.socket) -> None:
        overflow.close()
        os.environ.update(order.environment)

    os.environ["RANK"] = str(rank)
    set_line(Line(line, enter, is_spare=False))
    torch.set_num_threads(1)
    for attempt in attempts():
        with attempt:
            train(kind, tell)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def place(line: socket.socket) -> None:
    """Give a rank its next place."""
    order = BecomeRank(
        entry="script",
        command=("s.py",),
        directory="/",
        environment={"MASTER_PORT": os.environ["MASTER_PORT"]},
        stdout="",
        stderr="",
        logs_imports=False,
    )
    frame = encode_frame(order)
    with open(os.devnull, "rb") as null, socket.socketpair()[0] as overflow:
        del null
        socket.send_fds(line, [frame[:1]], [overflow.fileno()])
    line.sendall(frame[1:])


def main() -> None:
    kind, losses = sys.argv[1], int(sys.argv[2])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    ranks: list[tuple[int, socket.socket, socket.socket]] = []
    for rank in range(NUM_RANKS):
        line, their_line = socket.socketpair()
        told, tell = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (pid := os.fork()) == 0:
            run_rank(their_line, tell, rank, kind)
            os._exit(1)
        their_line.close()
        tell.close()
        ranks.append((pid, line, told))
    chance = random.Random(0)
    found: dict[str, Any] = {"wrong": 0, "counts": [[] for _ in ranks]}
    try:
        for _ in range(losses):
            for counts, (_, _, told) in zip(found["counts"], ranks, strict=True):
                while "counts" not in (said := json.loads(told.recv(1000))):
                    found["wrong"] += 1
                counts.append(said["counts"])
            time.sleep(chance.random() * 0.05)
            for _, line, _ in chance.sample(ranks, len(ranks)):
                line.sendall(encode_frame(InterruptRank(after_save=False)))
            for _, line, _ in ranks:
                while (said := line.recv(1)) != b"w":
                    assert said == b"a", "a rank has ended"
            os.environ["MASTER_PORT"] = free_port()
            for _, line, _ in ranks:
                place(line)
    finally:
        for pid, _, _ in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
