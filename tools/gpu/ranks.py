"""Tier B: several ranks of NCCL on one GPU, one of which dies or freezes: the others are interrupted within a second.

NCCL of 2.30 and newer allows several ranks on one GPU; older ones refuse a "Duplicate GPU". On a CPU, where tests run
this, Gloo carries the sums.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from oobleck.control.protocol import GroupValue, PeerMessage, WorkerAddress
from oobleck.control.steps import GroupKey, Interrupted, PeerLost
from oobleck.planner import WorkerId
from oobleck.training.comm import GroupTable, PeerLinks, Waiter, choose_device, use_device
from oobleck.training.comm.nccl_groups import TorchNccl
from tools.bench.local_workers import fork_context
from tools.gpu.checks import Check, Numbers, within

__all__ = ["CHECKS", "FAULTS", "measure_fault", "why_not"]

FAULTS = ("killed in a sum", "killed while they connect", "frozen in a sum")
_NUM_RANKS = 3
_VICTIM = _NUM_RANKS - 1
_NEWEST_NEEDED = (2, 30)
_SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}
_TIMEOUT_S = 60.0
_SUMS_FIRST = 3
"""Sums that are looked at before the fault."""


def why_not() -> str | None:
    """Return why several ranks cannot share a GPU here; None if they can."""
    if not torch.cuda.is_available():
        return None  # another reason is given
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version >= _NEWEST_NEEDED:
        return None
    return (
        f"it needs NCCL 2.30 or newer, which allows several ranks on one GPU; torch has {'.'.join(map(str, version))}"
    )


class _OneForAll(TorchNccl):
    """NCCL whose ranks are told apart, though they share a GPU."""

    def __init__(self, rank: int) -> None:
        super().__init__("127.0.0.1")
        self._rank = rank

    def identity(self, device: torch.device) -> str | None:
        return f"{super().identity(device)}/{self._rank}"

    def join(self, name: str, store: Store, rank: int, size: int, *, is_way: bool) -> object:
        os.environ.update(_SHARING)
        return super().join(name, store, rank, size, is_way=is_way)


def measure_fault(device: str, fault: str, *, num_rounds: int = 50, budget_s: float = 130.0) -> Numbers:
    """Have one of three ranks die or freeze, again and again, and tell the others as a fence does.

    The longest time that a survivor took to be interrupted after that, wrong sums before it, and how many rounds there
    was time for.
    """
    until_s = time.monotonic() + budget_s
    longest_s, wrong, rounds = 0.0, 0, 0
    context = fork_context()
    while rounds < num_rounds and time.monotonic() < until_s:
        pipes = [context.Pipe() for _ in range(_NUM_RANKS)]
        ranks: list[BaseProcess] = [
            context.Process(target=_be_rank, args=(theirs, rank, device, fault), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        try:
            for took_s, num_wrong in _round([ours for ours, _ in pipes], ranks, fault):
                longest_s, wrong = max(longest_s, took_s), wrong + num_wrong
        finally:
            for process in ranks:
                process.kill()
                process.join()
        rounds += 1
    return {"interrupted_s": longest_s, "wrong": wrong, "rounds": rounds}


def _round(pipes: Sequence[Connection], ranks: Sequence[BaseProcess], fault: str) -> list[tuple[float, int]]:
    """Return what each survivor says: seconds until it was interrupted, and wrong sums."""
    addresses = [_hear(pipe) for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    for pipe in pipes:
        assert _hear(pipe) == "ready for the fault"
    pid = ranks[_VICTIM].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP if fault.startswith("frozen") else signal.SIGKILL)
    survivors = pipes[:_VICTIM]
    for pipe in survivors:
        pipe.send("begin")
    time.sleep(0.2)  # they are in the sum, or in NCCL's init, by now
    for pipe in survivors:
        pipe.send("fence")
    return [_hear(pipe) for pipe in survivors]


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(_TIMEOUT_S):
        raise RuntimeError(f"a rank said nothing for {_TIMEOUT_S:g} s: it hangs")
    return pipe.recv()


def _be_rank(pipe: Connection, rank: int, device: str, fault: str) -> None:
    """A worker in its own process: this thread trains, another one hears of the fence."""
    torch.set_num_threads(1)
    computes_on = choose_device(device, 0)
    use_device(computes_on)
    worker_ids = tuple(WorkerId(node=f"node{number}", device=0) for number in range(_NUM_RANKS))
    waiter = Waiter(computes_on)
    tables: list[GroupTable] = []

    def hear(_: WorkerId, message: PeerMessage) -> None:
        assert isinstance(message, GroupValue)
        tables[0].take(message)

    links = PeerLinks(worker_ids[rank], "127.0.0.1", handle=hear)
    table = GroupTable(worker_ids[rank], "127.0.0.1", links, waiter, library=_OneForAll(rank))
    tables.append(table)
    pipe.send(links.address)
    addresses: list[WorkerAddress] = pipe.recv()
    links.know(addresses)
    key = GroupKey("reduce", 1, worker_ids)
    wrong = 0
    if not fault.endswith("connect"):
        table.form([key], lambda: False, generation=1)
        wrong = sum(_sum(table, key, rank, computes_on) for _ in range(_SUMS_FIRST))
    pipe.send("ready for the fault")
    if rank == _VICTIM:
        threading.Event().wait()
    assert pipe.recv() == "begin"
    fenced_s: list[float] = []

    def control() -> None:
        assert pipe.recv() == "fence"
        fenced_s.append(time.monotonic())
        waiter.announce()
        table.abort_fenced(is_pipeline_stopped=True)

    threading.Thread(target=control, daemon=True).start()
    try:
        if fault.endswith("connect"):
            table.form([key], lambda: bool(fenced_s), generation=1)
        table[key].all_reduce(torch.ones(1 << 20, device=computes_on)).wait(lambda: bool(fenced_s))
    except (Interrupted, PeerLost):  # Gloo may see first that a peer is gone
        pass
    else:
        raise RuntimeError("a sum was complete without a peer's part")
    ended_s = time.monotonic()
    pipe.send((max(0.0, ended_s - fenced_s[0]) if fenced_s else 0.0, wrong))
    threading.Event().wait()


def _sum(table: GroupTable, key: GroupKey, rank: int, device: torch.device) -> bool:
    """Return whether a sum is wrong."""
    tensor = torch.full((1 << 16,), float(rank + 1), device=device)
    table[key].all_reduce(tensor).wait(lambda: False)
    return not bool((tensor == sum(range(1, _NUM_RANKS + 1))).all())


CHECKS: Sequence[Check] = tuple(
    Check(
        tier="B",
        name=f"three ranks on one GPU, one {fault}",
        measure=partial(measure_fault, "cuda", fault),
        judge=within({"rounds": 10}, {"interrupted_s": 1.0, "wrong": 0}),
        why_not=why_not,
    )
    for fault in FAULTS
)
