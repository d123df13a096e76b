"""What members do: functions of a pipe to the test, a directory in which all meet, and their own arguments."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from oobleck.control.steps import Interrupted
from oobleck.planner import WorkerId
from oobleck.training.comm.nccl import NcclGroup, NcclWork
from oobleck.training.comm.nccl_groups import TorchNccl

COUNT = 300_000
"""Elements of a sum: more than the stub's links hold at once."""


def join(directory: Path, name: str, rank: int, size: int, *, device: int, is_way: bool = False) -> NcclGroup:
    """Join a group as the project's workers do, over a store in the directory."""
    own = torch.device("cuda", device)
    torch.cuda.set_device(own)
    store = dist.FileStore(str(directory / f"store-{name}"), size)
    group = TorchNccl("127.0.0.1").join(name, store, rank, size, is_way=is_way)
    return NcclGroup(name, WorkerId(node=f"n{rank}", device=0), own, group, store)


def outcome_of(call: Callable[[], object]) -> str:
    """Return the name of what a call raises, or an empty text."""
    try:
        call()
    except (Interrupted, RuntimeError) as error:
        return type(error).__name__
    return ""


def sees_devices(pipe: Connection, _directory: Path) -> None:
    count = torch.cuda.device_count()
    pipe.send([str(torch.cuda.get_device_properties(each).uuid) for each in range(count)])
    pinned = torch.arange(8.0).pin_memory()
    on_last = pinned.to(f"cuda:{count - 1}", non_blocking=True)
    torch.cuda.synchronize(on_last.device)
    pipe.send((pinned.is_pinned(), on_last.device.index, on_last.tolist()))


def trains(pipe: Connection, _directory: Path, device: str) -> None:
    """Train a small model, and say its losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    inputs, labels = torch.randn(32, 8), torch.randint(4, (32,))
    model, inputs, labels = model.double().to(device), inputs.double().to(device), labels.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        pipe.send(loss.item())


def launches_a_kernel(pipe: Connection, _directory: Path) -> None:
    pipe.send(outcome_of(lambda: torch.cuda._sleep(1)))


def forks_after_use(pipe: Connection, _directory: Path) -> None:
    """Use a device, fork, and use it there."""
    torch.zeros(1, device="cuda")
    if (child := os.fork()) == 0:
        runtime = ctypes.CDLL(None)
        os._exit(runtime.cudaSetDevice(0))
    pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def sums(pipe: Connection, directory: Path, ranks: list[int], size: int) -> None:
    """Take part in a sum, a gather and a sum into shares with several devices of this process, each by a thread."""

    def run(rank: int) -> None:
        group = join(directory, "sum", rank, size, device=rank)
        values = torch.arange(COUNT, dtype=torch.float64)
        own = values.to(group.device) * (rank + 1)
        rows, total = own.new_zeros((size, COUNT)), own.clone()
        group.all_gather(rows, own).finish()
        group.all_reduce(total).finish()
        part = torch.zeros_like(own)
        group.reduce_scatter(part, rows * (rank + 1)).finish()
        torch.cuda.synchronize(group.device)
        factor = size * (size + 1) // 2
        expected = [torch.stack([values * (each + 1) for each in range(size)]), values * factor]
        expected.append(values * (rank + 1) * factor)
        found = [each.cpu() for each in (rows, total, part)]
        pipe.send((rank, all(map(torch.equal, found, expected))))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def sends(pipe: Connection, directory: Path, rank: int, count: int) -> None:
    """Send messages, or receive them and say their totals."""
    group = join(directory, "way", rank, 2, device=rank, is_way=True)
    for number in range(count):
        tensor = torch.arange(COUNT, dtype=torch.bfloat16, device=group.device) + number
        if rank == 0:
            group.send(tensor).finish()
        else:
            room = torch.zeros_like(tensor)
            group.receive(room).finish()
            torch.cuda.synchronize(group.device)
            pipe.send(bool(torch.equal(room, tensor)))


def waits_for_a_peer(pipe: Connection, directory: Path, rank: int) -> None:
    """Have a sum wait for the other member, and say what part of a core this process takes meanwhile."""
    group = join(directory, "sum", rank, 2, device=rank)
    values = torch.ones(COUNT, device=group.device)
    group.all_reduce(values).finish()
    if rank == 0:
        group.all_reduce(values)
        time.sleep(1.0)
        began_s, used_s = time.monotonic(), time.process_time()
        time.sleep(3.0)
        pipe.send((time.process_time() - used_s) / (time.monotonic() - began_s))
    pipe.recv()


def waits_in_a_sum(pipe: Connection, directory: Path, rank: int) -> None:
    """Take part in one sum, and wait in the next until told to end it; say what came of it, and how long it took."""
    group = join(directory, "sum", rank, 2, device=rank)
    values = torch.ones(COUNT, device=group.device)
    group.all_reduce(values).finish()
    pipe.send("connected")
    if pipe.recv() == "wait":
        began_s = time.monotonic()
        work = group.all_reduce(values)

        def fence() -> None:
            pipe.recv()
            group.abort()

        threading.Thread(target=fence, daemon=True).start()
        said = outcome_of(work.finish)
        pipe.send((said, time.monotonic() - began_s))
        group.abort()
        wait_for_aborts()
        torch.cuda.synchronize(group.device)
        pipe.send((time.monotonic() - began_s, values[:3].tolist(), values[-3:].tolist()))


def has_its_groups_aborted(pipe: Connection, directory: Path, rounds: int) -> None:
    """Poll sums of two groups while both are aborted, again and again; say how long no Python thread ran meanwhile."""
    longest_s = 0.0

    def beat() -> None:
        nonlocal longest_s
        last_s = time.monotonic()
        while True:
            time.sleep(0.001)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s

    threading.Thread(target=beat, daemon=True).start()
    for number in range(rounds):
        groups = [join_with_peer(directory, f"{number}{name}") for name in "AB"]
        sums = [group.all_reduce(torch.zeros(8, device=group.device)) for group in groups for _ in range(6)]
        polling = [threading.Thread(target=outcome_of, args=(each.finish,), daemon=True) for each in sums]
        for thread in polling:
            thread.start()
        time.sleep(0.05)
        longest_s = 0.0
        for group in groups:
            group.abort()
        for thread in polling:
            thread.join()
        wait_for_aborts()
        pipe.send(longest_s)


def posts_after_an_error(pipe: Connection, directory: Path) -> None:
    """Post a sum after the peer of an earlier one was lost; say how long that takes, and to let go of its tensors."""
    group = join_with_peer(directory, "sum")
    group.all_reduce(torch.zeros(8, device=group.device))
    pipe.send("waits")
    pipe.recv()
    time.sleep(0.5)  # the watchdog looks every 100 ms
    began_s = time.monotonic()
    threading.Timer(0.5, group.abort).start()
    outcome_of(lambda: group.all_reduce(torch.zeros(8, device=group.device)))
    pipe.send(time.monotonic() - began_s)
    group.abort()
    wait_for_aborts()
    pipe.send(time.monotonic() - began_s)


def has_a_sum_fail_beside_another(pipe: Connection, directory: Path) -> None:
    """Wait in sums of two groups until told that links are broken; say what comes of the first, and how soon."""
    groups = [join_with_peer(directory, name) for name in "AB"]
    first, _ = [group.all_reduce(torch.zeros(8, device=group.device)) for group in groups]
    pipe.send("waits")
    pipe.recv()
    began_s = time.monotonic()
    said = outcome_of(first.finish)
    pipe.send((said, time.monotonic() - began_s))
    for group in groups:
        group.abort()
    wait_for_aborts()


def has_its_device_fail(pipe: Connection, directory: Path) -> None:
    """Wait in a sum until told that the device has failed; say what comes of it, and what is in its memory."""
    group = join_with_peer(directory, "sum")
    values = torch.ones(COUNT, device=group.device)
    work = group.all_reduce(values)
    pipe.send("waits")
    pipe.recv()
    said = outcome_of(work.finish)
    time.sleep(0.1)  # the stub looks every few milliseconds at what waits long
    memory = (ctypes.c_float * COUNT).from_address(values.data_ptr())  # no copy comes out of such a device
    pipe.send((said, [memory[0], memory[COUNT - 1]]))


def says_what_torch_records(pipe: Connection, directory: Path) -> None:
    """Take part in a sum; say how many operations torch's flight recorder has of it, and what torch has printed."""
    printed = directory / "printed"
    with printed.open("wb") as file:
        os.dup2(file.fileno(), 2)
    join_with_peer(directory, "sum")
    pipe.send(
        (len(pickle.loads(torch._C._distributed_c10d._dump_nccl_trace()).get("entries", [])), printed.read_text())
    )


def join_with_peer(directory: Path, name: str) -> NcclGroup:
    """Join a group of two with a thread of this process, which takes part in one sum and never again."""
    stays: list[object] = []

    def take_part() -> None:
        peer = join(directory, name, 1, 2, device=1)
        peer.all_reduce(torch.zeros(8, device=peer.device)).finish()
        stays.append(peer)

    peer = threading.Thread(target=take_part)
    peer.start()
    group = join(directory, name, 0, 2, device=0)
    group.all_reduce(torch.zeros(8, device=group.device)).finish()
    peer.join()
    _PEERS.extend(stays)
    return group


_PEERS: list[object] = []


def wait_for_aborts() -> None:
    while any(thread.name.startswith("abort") for thread in threading.enumerate()):
        time.sleep(0.001)


def steps(pipe: Connection, directory: Path, rank: int, size: int) -> None:
    """Take steps with neighbours until a fence: messages along the ranks, then sums; say which sums were right.

    The sums of a step are in two groups, some of them posted later, as in a backward pass, and a thread polls each. A
    fence is answered before anything is aborted. Last of all it says how the steps ended, or that they did not.
    """
    groups: list[NcclGroup] = []
    said = ["stuck"]
    writing = threading.Lock()  # two threads write to the pipe

    def say(word: str, value: object) -> None:
        with writing:
            pipe.send((word, value))

    def taken(name: str, own: int, members: int, *, is_way: bool = False) -> NcclGroup:
        groups.append(join(directory, name, own, members, device=rank, is_way=is_way))
        return groups[-1]

    def take() -> None:
        before = taken(f"way{rank}", 1, 2, is_way=True) if rank > 0 else None
        after = taken(f"way{rank + 1}", 0, 2, is_way=True) if rank < size - 1 else None
        everyone = [taken(name, rank, size) for name in ("sum", "other sum")]
        for number in range(10_000):
            hidden = torch.full((COUNT,), float(number), device=f"cuda:{rank}")
            if before is not None:
                before.receive(hidden.zero_()).finish()
            if after is not None:
                after.send(hidden + 1.0).finish()
            totals = [hidden * scale for scale in _SCALES]
            posted = [polled(everyone[at % 2].all_reduce(total)) for at, total in enumerate(totals[:2])]
            time.sleep(_BACKWARD_S)
            posted += [polled(everyone[at % 2].all_reduce(total)) for at, total in enumerate(totals[2:])]
            for concluded in posted:
                concluded()
            torch.cuda.current_stream(hidden.device).synchronize()
            expected = number * size + size * (size - 1) // 2
            right = [bool(total.eq(expected * scale).all()) for total, scale in zip(totals, _SCALES, strict=True)]
            say("step", all(right))

    def run() -> None:
        said[0] = outcome_of(take)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    pipe.recv()
    say("fenced", True)
    for group in groups:
        group.abort()
    pipe.recv()
    thread.join(5.0)
    say("ended", said[0])


_SCALES = (1.0, 2.0, 3.0, 4.0)
_BACKWARD_S = 0.25
"""Time enough for torch's watchdog, which looks every 100 ms, to find that a peer is lost."""


def polled(work: NcclWork) -> Callable[[], None]:
    """Poll a sum on a thread of its own; return what waits for it, and concludes it."""

    def poll() -> None:
        while not work.is_done():
            time.sleep(work.poll_s)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()

    def conclude() -> None:
        thread.join()
        work.conclude()

    return conclude
