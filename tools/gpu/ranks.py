"""Tier B: three ranks of NCCL, one of which dies or freezes: the others are interrupted within a second.

Each rank has a GPU of its own where there are three. Else all share the first, as hosts of their own: NCCL tells hosts
apart by `NCCL_HOSTID`, and refuses a GPU twice only within a host ("Duplicate GPU" in its init.cc). Their messages then
go through sockets. On a CPU, where tests run this, Gloo carries the sums.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from oobleck.control.protocol import GroupValue, PeerMessage, WorkerAddress
from oobleck.control.steps import GroupKey, Interrupted, PeerLost
from oobleck.planner import WorkerId
from oobleck.training.comm import GroupTable, PeerLinks, Reduction, Waiter, choose_device, use_device
from oobleck.training.comm.nccl_groups import TorchNccl
from tools.bench.local_workers import fork_context
from tools.gpu.checks import Check, Numbers, within
from tools.gpu.prerequisites import Need

__all__ = [
    "CHECKS",
    "FAULTS",
    "AsHosts",
    "Fault",
    "StandStill",
    "await_aborts",
    "hear",
    "measure_fault",
    "sharing",
    "why_not",
]

_NUM_RANKS = 3
_VICTIM = _NUM_RANKS - 1
_TIMEOUT_S = 60.0
_SUMS_FIRST = 3
"""Sums that are looked at before the fault."""
_ENDS_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What befalls one rank, and what the others are at meanwhile."""

    name: str
    signal: signal.Signals
    while_connecting: bool = False
    num_groups: int = 1
    """Groups in each of which the others have a sum open, and poll it."""
    posts_again: bool = False
    """Whether the others post another sum once NCCL has seen that the rank is gone."""

    @property
    def fence_after_s(self) -> float:
        return 2.0 if self.posts_again else 0.2  # by then they are in the sum, or in NCCL's init


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(name="killed in a sum", signal=signal.SIGKILL),
        Fault(name="killed while they connect", signal=signal.SIGKILL, while_connecting=True),
        Fault(name="frozen in a sum", signal=signal.SIGSTOP),
        Fault(name="frozen in sums of two groups", signal=signal.SIGSTOP, num_groups=2),
        Fault(name="killed before the next sum", signal=signal.SIGKILL, posts_again=True),
    )
}


def sharing(rank: int) -> Mapping[str, str]:
    """Return the environment in which a rank shares a GPU with others, which NCCL takes for other hosts'."""
    return {
        "NCCL_HOSTID": f"verify{rank}",
        "NCCL_NET": "Socket",
        "NCCL_MAX_CTAS": "1",  # all ranks' kernels spin at once
        "NCCL_NVLS_ENABLE": "0",
    }


_PROBE = """
import sys
import torch
import torch.distributed as dist
backend, device, place, rank = sys.argv[1:]
dist.init_process_group(backend, init_method=f"file://{place}", rank=int(rank), world_size=2)
number = torch.ones(1, device=device)
dist.all_reduce(number)
assert number.item() == 2.0, f"the sum of 1 and 1 is {number.item()}"
"""


@functools.cache
def why_not(backend: str = "nccl", device: str = "cuda") -> str | None:
    """Return why ranks have no GPU each, and cannot share one; None if they have, or can. By torch alone."""
    if device == "cuda" and torch.cuda.device_count() >= _NUM_RANKS:
        return None
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _PROBE, backend, device, str(Path(directory) / "store"), str(rank)],
                env={**os.environ, **sharing(rank), "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "=lo"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            return f"two ranks on one GPU have not summed a number within {_TIMEOUT_S:g} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    failed = [text.splitlines() for rank, text in zip(ranks, said, strict=True) if rank.returncode]
    if not failed:
        return None
    of_nccl = [line for lines in failed for line in lines if "NCCL WARN" in line]
    return f"two ranks cannot share a GPU: {(of_nccl or failed[0] or ['they say nothing'])[-1].strip()}"


class AsHosts(TorchNccl):
    """NCCL whose ranks it takes for hosts of their own, so that they may share a GPU."""

    def __init__(self, rank: int) -> None:
        super().__init__("127.0.0.1")
        self._rank = rank

    def identity(self, device: torch.device) -> str | None:
        return f"{super().identity(device)}/{self._rank}"

    def join(self, name: str, store: Store, rank: int, size: int, *, is_way: bool) -> object:
        os.environ.update(sharing(self._rank))
        return super().join(name, store, rank, size, is_way=is_way)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survivor:
    """What a rank says that a fault has left."""

    interrupted_s: float
    """From the fence to the end of its sum."""
    wrong: int
    """Sums before the fault that are not what they must be."""
    stood_still_s: float
    """The longest time for which none of its Python threads ran, until all aborts had ended."""
    posted_s: float
    """How long it took to post a sum after the fault."""


def measure_fault(device: str, fault: Fault, *, num_rounds: int = 20, budget_s: float = 75.0) -> Numbers:
    """Have one of three ranks die or freeze, again and again, and tell the others as a fence does.

    The worst of all survivors, and how many rounds there was time for. Raises RuntimeError for a rank that hangs.
    """
    until_s = time.monotonic() + budget_s
    survivors: list[_Survivor] = []
    context, rounds = fork_context(), 0
    has_own = device == "cuda" and torch.cuda.device_count() >= _NUM_RANKS
    while rounds < num_rounds and time.monotonic() < until_s:
        pipes = [context.Pipe() for _ in range(_NUM_RANKS)]
        ranks: list[BaseProcess] = [
            context.Process(target=_be_rank, args=(theirs, rank, device, fault, has_own), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        for _, theirs in pipes:
            theirs.close()  # so that a rank that ends is heard to
        try:
            survivors += _round([ours for ours, _ in pipes], ranks, fault)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        rounds += 1
    return {
        "interrupted_s": max(each.interrupted_s for each in survivors),
        "wrong": sum(each.wrong for each in survivors),
        "stood_still_s": max(each.stood_still_s for each in survivors),
        "posted_s": max(each.posted_s for each in survivors),
        "rounds": rounds,
    }


def _round(pipes: Sequence[Connection], ranks: Sequence[BaseProcess], fault: Fault) -> list[_Survivor]:
    addresses = [hear(pipe) for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    for pipe in pipes:
        assert hear(pipe) == "ready for the fault"
    pid = ranks[_VICTIM].pid
    assert pid is not None
    os.kill(pid, fault.signal)
    survivors = pipes[:_VICTIM]
    for pipe in survivors:
        pipe.send("begin")
    time.sleep(fault.fence_after_s)
    for pipe in survivors:
        pipe.send("fence")
    return [hear(pipe) for pipe in survivors]


def hear(pipe: Connection) -> Any:
    """Return what a rank says next. Raises RuntimeError if it says nothing."""
    if not pipe.poll(_TIMEOUT_S):
        raise RuntimeError(f"a rank said nothing for {_TIMEOUT_S:g} s: it hangs")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a rank has ended; its error is on standard error") from None


class StandStill:
    """Watches for how long no Python thread of this process runs: something holds the interpreter's lock."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="stand still").start()

    def end(self) -> float:
        """Stop watching; return the longest time, in seconds."""
        self._is_over.set()
        return self.longest_s

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._is_over.wait(1e-3):
            now_s = time.monotonic()
            self.longest_s, before_s = max(self.longest_s, now_s - before_s), now_s


def _be_rank(pipe: Connection, rank: int, device: str, fault: Fault, has_own: bool) -> None:
    """A worker in its own process: this thread trains, another one hears of the fence."""
    torch.set_num_threads(1)
    computes_on = choose_device(device, rank if has_own else 0)
    use_device(computes_on)
    worker_ids = tuple(WorkerId(node=f"node{number}", device=0) for number in range(_NUM_RANKS))
    waiter = Waiter(computes_on)
    tables: list[GroupTable] = []

    def take(_: WorkerId, message: PeerMessage) -> None:
        assert isinstance(message, GroupValue)
        tables[0].take(message)

    links = PeerLinks(worker_ids[rank], "127.0.0.1", handle=take)
    # Only through sockets does NCCL see that another process is gone.
    library = TorchNccl("127.0.0.1") if has_own and not fault.posts_again else AsHosts(rank)
    table = GroupTable(worker_ids[rank], "127.0.0.1", links, waiter, library=library)
    tables.append(table)
    pipe.send(links.address)
    addresses: list[WorkerAddress] = pipe.recv()
    links.know(addresses)
    keys = [GroupKey("reduce", number, worker_ids) for number in range(1, fault.num_groups + 1)]
    wrong = 0
    if not fault.while_connecting:
        table.form(keys, lambda: False, generation=1)
        wrong = sum(_sum(table, key, rank, computes_on) for _ in range(_SUMS_FIRST) for key in keys)
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

    still = StandStill()
    fence = threading.Thread(target=control, daemon=True)
    fence.start()
    if fault.while_connecting:
        ended_s, posted_s = _connect(table, keys, fenced_s), 0.0
    else:
        ended_s, posted_s = _wait_in_vain(table, keys, computes_on, fenced_s, posts_again=fault.posts_again)
    fence.join(_TIMEOUT_S)
    await_aborts()
    pipe.send(
        _Survivor(
            interrupted_s=max(0.0, ended_s - fenced_s[0]) if fenced_s else 0.0,
            wrong=wrong,
            stood_still_s=still.end(),
            posted_s=posted_s,
        )
    )
    threading.Event().wait()


def _connect(table: GroupTable, keys: Sequence[GroupKey], fenced_s: Sequence[float]) -> float:
    """Form groups with a rank that is gone; return when that was given up."""
    try:
        table.form(keys, lambda: bool(fenced_s), generation=1)
    except (Interrupted, PeerLost):  # Gloo may see first that a peer is gone
        return time.monotonic()
    raise RuntimeError("a group was formed without a member")


def _wait_in_vain(
    table: GroupTable, keys: Sequence[GroupKey], device: torch.device, fenced_s: Sequence[float], *, posts_again: bool
) -> tuple[float, float]:
    """Wait for sums that a peer has no part in; return when that ended, and how long posting another one took."""
    posted_s = 0.0
    try:
        first, *others = [table[key].all_reduce(torch.ones(1 << 20, device=device)) for key in keys]
        for other in others:  # as an edge's helper does
            threading.Thread(target=_poll, args=(other, fenced_s), daemon=True).start()
        if posts_again:
            time.sleep(1.0)  # NCCL has seen it by now, and torch's watchdog too
            began_s = time.monotonic()
            try:
                table[keys[0]].all_reduce(torch.ones(1, device=device))
            finally:
                posted_s = time.monotonic() - began_s
        first.wait(lambda: bool(fenced_s))
    except (Interrupted, PeerLost):
        return time.monotonic(), posted_s
    raise RuntimeError("a sum was complete without a peer's part")


def _poll(reduction: Reduction, fenced_s: Sequence[float]) -> None:
    while not fenced_s or time.monotonic() < fenced_s[0] + 1.0:
        reduction.is_done()
        time.sleep(2e-4)


def await_aborts() -> None:
    """Block until all aborts that are under way in this process have ended."""
    until_s = time.monotonic() + _ENDS_WITHIN_S
    while any(thread.name.startswith("abort ") for thread in threading.enumerate()):
        if time.monotonic() > until_s:
            raise RuntimeError(f"aborts have not ended within {_ENDS_WITHIN_S:g} s")
        time.sleep(1e-3)


def _sum(table: GroupTable, key: GroupKey, rank: int, device: torch.device) -> bool:
    """Return whether a sum is wrong."""
    tensor = torch.full((1 << 16,), float(rank + 1), device=device)
    table[key].all_reduce(tensor).wait(lambda: False)
    return not bool((tensor == sum(range(1, _NUM_RANKS + 1))).all())


CHECKS: Sequence[Check] = tuple(
    Check(
        tier="B",
        name=f"three ranks, one {name}",
        measure=partial(measure_fault, "cuda", fault),
        judge=within({"rounds": 3}, {"interrupted_s": 1.0, "wrong": 0, "stood_still_s": 0.5, "posted_s": 1.0}),
        needs=(Need.SHARED_GPU,),
        why_not=why_not,
    )
    for name, fault in FAULTS.items()
)
