"""Tier B: messages between two GPUs, over communicators of NCCL's."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch._C._distributed_c10d import Store

from oobleck.control.protocol import GroupValue, PeerMessage
from oobleck.control.steps import GroupKey
from oobleck.planner import WorkerId
from oobleck.training.comm import Group, GroupTable, PeerLinks, Waiter, use_device
from oobleck.training.comm.nccl_groups import NcclLibrary, TorchNccl
from tools.gpu.checks import Check, Numbers, within

__all__ = ["CHECKS", "measure_edges"]


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
    """A worker in this process, with a GPU of its own."""

    def __init__(self, worker_id: WorkerId, index: int, library: NcclLibrary) -> None:
        self.device = torch.device("cuda", index)
        self.library = _Counting(library)
        self.links = PeerLinks(worker_id, "127.0.0.1", handle=lambda _, message: self._hear(message))
        self.table = GroupTable(worker_id, "127.0.0.1", self.links, Waiter(self.device), library=self.library)

    def _hear(self, message: PeerMessage) -> None:
        assert isinstance(message, GroupValue)
        self.table.take(message)

    def form(self, key: GroupKey) -> Group:
        use_device(self.device)
        self.table.form([key], lambda: False, generation=1)
        return self.table[key]

    def expect(self, group: Group, source: int, tag: int, shape: tuple[int, ...]) -> None:
        group.inbox(source).expect(
            tag, lambda tag: group.post_receive_ahead(shape, torch.bfloat16, self.device, source, tag)
        )

    def exchange(self, group: Group, num_messages: int, shape: tuple[int, ...]) -> int:
        """Send messages, and return how many of the other's are not what it sent."""
        use_device(self.device)
        own, other, wrong = group.rank, 1 - group.rank, 0
        sent = []  # what Gloo carries in place of NCCL must be kept until it is there
        for number in range(num_messages):
            self.expect(group, other, 2 * number + other, shape)
        for number in range(num_messages):
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            tensor.copy_(_message(own, number, shape))
            sent.append((group.send_off(tensor, other, 2 * number + own), tensor))
            received = group.inbox(other).take(lambda: False)
            wrong += not torch.equal(received.cpu(), _message(other, number, shape))
        for pending, _ in sent:
            if pending is not None:
                pending.wait()
        return wrong


def _message(sender: int, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * number + sender)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def measure_edges(
    libraries: Sequence[NcclLibrary], *, num_messages: int = 20, shape: tuple[int, ...] = (4, 2048, 1024)
) -> Numbers:
    """Messages both ways between two stages, and the abort of a receive whose sender froze."""
    worker_ids = tuple(WorkerId(node=node, device=0) for node in ("one", "two"))
    stages = [_Stage(worker_id, index, libraries[index]) for index, worker_id in enumerate(worker_ids)]
    for stage in stages:
        stage.links.know([each.links.address for each in stages])
    key = GroupKey("pipeline", 1, worker_ids)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda stage: stage.form(key), stages))
        wrong = sum(pool.map(lambda stage, group: stage.exchange(group, num_messages, shape), stages, groups))
    communicators = sum(stage.library.num_joined for stage in stages)
    abort_s = _abort_s(stages, groups, 2 * num_messages, shape) if communicators else 0.0
    for stage in stages:
        stage.table.keep_only([], generation=2)
        stage.links.close()
    return {"wrong": wrong, "communicators": communicators, "abort_s": abort_s}


def _abort_s(stages: Sequence[_Stage], groups: Sequence[Group], tag: int, shape: tuple[int, ...]) -> float:
    """How long the end of a receive takes whose sender says that it comes, and never does."""
    stages[1].expect(groups[1], 0, tag, shape)
    groups[0].receive(torch.empty(1, dtype=torch.uint8), 1, tag)  # there is room for it
    groups[0].send(torch.zeros(1, dtype=torch.uint8), 1, tag).wait()
    time.sleep(0.2)
    began_s = time.monotonic()
    stages[1].table.abort_fenced(is_pipeline_stopped=True)
    torch.cuda.synchronize(stages[1].device)
    while any(thread.name.startswith("abort ") for thread in threading.enumerate()):
        time.sleep(1e-3)
    return time.monotonic() - began_s


def _edges() -> Numbers:
    return measure_edges([TorchNccl("127.0.0.1"), TorchNccl("127.0.0.1")])


CHECKS: Sequence[Check] = (
    Check(
        tier="B",
        name="messages between stages",
        measure=_edges,
        judge=within({"communicators": 4}, {"wrong": 0, "abort_s": 1.0}),
        num_gpus=2,
    ),
)
