"""Tier B: messages between two stages over communicators of NCCL's, on a GPU each or on one that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess

import torch
from torch._C._distributed_c10d import Store

from oobleck.control.protocol import GroupValue, PeerMessage
from oobleck.control.steps import GroupKey
from oobleck.planner import WorkerId
from oobleck.training.comm import Group, GroupTable, PeerLinks, Waiter, choose_device, use_device
from oobleck.training.comm.nccl_groups import NcclLibrary, TorchNccl
from tools.bench.local_workers import fork_context
from tools.gpu.checks import Check, Numbers, within
from tools.gpu.prerequisites import Need
from tools.gpu.ranks import AsHosts, await_aborts, hear, why_not

__all__ = ["CHECKS", "NUM_STAGES", "measure_edges", "measure_stages", "play"]

NUM_STAGES = 2
_WORKER_IDS = tuple(WorkerId(node=f"node{stage}", device=0) for stage in range(NUM_STAGES))
_KEY = GroupKey("pipeline", 1, _WORKER_IDS)
_SHAPE = (4, 2048, 1024)
_NUM_MESSAGES = 20


class _Counting:
    """A library of NCCL, and how many communicators are opened with it."""

    def __init__(self, library: NcclLibrary) -> None:
        self._library = library
        self.num_joined = 0

    def identity(self, device: torch.device) -> str | None:
        return self._library.identity(device)

    def join(self, name: str, store: Store, rank: int, size: int, *, is_way: bool) -> object:
        self.num_joined += 1
        return self._library.join(name, store, rank, size, is_way=is_way)


class _Stage:
    """A worker of a pipeline of two."""

    def __init__(self, index: int, device: torch.device, library: NcclLibrary, shape: tuple[int, ...]) -> None:
        self.other = 1 - index
        self.device = device
        self.library = _Counting(library)
        self._own, self._shape = index, shape
        self.links = PeerLinks(_WORKER_IDS[index], "127.0.0.1", handle=lambda _, message: self._take(message))
        self.table = GroupTable(_WORKER_IDS[index], "127.0.0.1", self.links, Waiter(device), library=self.library)

    def _take(self, message: PeerMessage) -> None:
        assert isinstance(message, GroupValue)
        self.table.take(message)

    def form(self) -> Group:
        use_device(self.device)
        self.table.form([_KEY], lambda: False, generation=1)
        return self.table[_KEY]

    def expect(self, group: Group, tag: int) -> None:
        group.inbox(self.other).expect(
            tag, lambda tag: group.post_receive_ahead(self._shape, torch.bfloat16, self.device, self.other, tag)
        )

    def exchange(self, group: Group, num_messages: int) -> int:
        """Send messages, and return how many of the other's are not what it sent."""
        wrong = 0
        sent = []  # what Gloo carries in place of NCCL must be kept until it is there
        for number in range(num_messages):
            self.expect(group, 2 * number + self.other)
        for number in range(num_messages):
            tensor = torch.empty(self._shape, dtype=torch.bfloat16, device=self.device)
            tensor.copy_(_message(self._own, number, self._shape))
            sent.append((group.send_off(tensor, self.other, 2 * number + self._own), tensor))
            received = group.inbox(self.other).take(lambda: False)
            wrong += not torch.equal(received.cpu(), _message(self.other, number, self._shape))
        for pending, _ in sent:
            if pending is not None:
                pending.wait()
        return wrong

    def announce_in_vain(self, group: Group, tag: int) -> None:
        """Say that a message comes, as a stage does that freezes before it is sent."""
        group.receive(torch.empty(1, dtype=torch.uint8), self.other, tag)  # there is room for it
        group.send(torch.zeros(1, dtype=torch.uint8), self.other, tag).wait()

    def abort_s(self, group: Group, tag: int) -> float:
        """Return how long the end of a receive takes whose sender says that it comes, and never does."""
        self.expect(group, tag)
        time.sleep(0.5)
        began_s = time.monotonic()
        self.table.abort_fenced(is_pipeline_stopped=True)
        torch.cuda.synchronize(self.device)
        await_aborts()
        return time.monotonic() - began_s


def _message(sender: int, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * number + sender)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def play(
    pipe: Connection, index: int, device: torch.device, library: NcclLibrary, num_messages: int, shape: tuple[int, ...]
) -> None:
    """Be a stage that `measure_stages` hears at the other end of a pipe."""
    stage = _Stage(index, device, library, shape)
    pipe.send(stage.links.address)
    stage.links.know(pipe.recv())
    group = stage.form()
    pipe.send((stage.exchange(group, num_messages), stage.library.num_joined))
    if stage.library.num_joined:
        tag = 2 * num_messages
        if index == 0:
            stage.announce_in_vain(group, tag)
        else:
            pipe.send(stage.abort_s(group, tag))
    pipe.recv()
    stage.table.keep_only([], generation=2)
    stage.links.close()


def measure_stages(start: Callable[[Connection, int], None]) -> Numbers:
    """Hear what two stages measure: messages both ways, and the abort of a receive whose sender froze.

    `start` has one `play` at the other end of a pipe.
    """
    ends = [Pipe() for _ in range(NUM_STAGES)]
    for index, (_, theirs) in enumerate(ends):
        start(theirs, index)
    pipes = [ours for ours, _ in ends]
    addresses = [hear(pipe) for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    wrong, communicators = map(sum, zip(*(hear(pipe) for pipe in pipes), strict=True))
    abort_s = hear(pipes[1]) if communicators else 0.0
    for pipe in pipes:
        pipe.send("end")
    return {"wrong": wrong, "communicators": communicators, "abort_s": abort_s}


def measure_edges(device: str, *, num_messages: int = _NUM_MESSAGES, shape: tuple[int, ...] = _SHAPE) -> Numbers:
    """Measure two stages, each in a process."""
    context, processes = fork_context(), list[BaseProcess]()
    has_own = device == "cuda" and torch.cuda.device_count() >= NUM_STAGES

    def start(pipe: Connection, index: int) -> None:
        arguments = (pipe, index, device, has_own, num_messages, shape)
        processes.append(context.Process(target=_be_stage, args=arguments, daemon=True))
        processes[-1].start()
        pipe.close()

    try:
        return measure_stages(start)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _be_stage(
    pipe: Connection, index: int, device: str, has_own: bool, num_messages: int, shape: tuple[int, ...]
) -> None:
    torch.set_num_threads(1)
    computes_on = choose_device(device, index if has_own else 0)
    use_device(computes_on)
    library = TorchNccl("127.0.0.1") if has_own else AsHosts(index)
    play(pipe, index, computes_on, library, num_messages, shape)


def _why_not() -> str | None:
    return None if torch.cuda.device_count() >= NUM_STAGES else why_not()


CHECKS: Sequence[Check] = (
    Check(
        tier="B",
        name="messages between stages",
        measure=lambda: measure_edges("cuda"),
        judge=within({"communicators": 4}, {"wrong": 0, "abort_s": 1.0}),
        needs=(Need.SHARED_GPU,),
        why_not=_why_not,
    ),
)
