"""What tensors of a GPU go through, with the CPU's: copied, handed over, posted in order, received, copied back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from oobleck.control.commit.commit_state import Interrupted
from oobleck.planner import WorkerId
from oobleck.training.comm.groups import Group, GroupKey
from oobleck.training.comm.staging import Courier, HostCopy, Posting
from oobleck.training.comm.sums import StagedSum
from oobleck.training.comm.waiter import Waiter
from tests.training.table import LinkedTable, acquaint

PLACES = tuple(WorkerId(node=node, device=0) for node in "ab")
KEY = GroupKey("pipeline", 1, PLACES)


def _groups(*, stages: tuple[bool, bool], waiters: type[Waiter] = Waiter) -> tuple[Group, ...]:
    """A group of two members, seen from both of them."""
    tables = [
        LinkedTable(worker_id, waiter=waiters(), stages=staged)
        for worker_id, staged in zip(PLACES, stages, strict=True)
    ]
    acquaint(tables)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda table: table.groups.form([KEY], lambda: False, generation=1), tables))
    return tuple(table.groups[KEY] for table in tables)


def _both(work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


@pytest.mark.parametrize("stages", [(True, True), (True, False), (False, True)])
def test_messages_arrive_as_they_were_when_they_were_sent(stages: tuple[bool, bool]):
    groups = _groups(stages=stages)
    sent = [torch.full((3, 2), float(number)) for number in range(4)]

    def work(rank: int) -> torch.Tensor:
        if rank == 0:
            pending = [groups[0].send(tensor, 1, tag) for tag, tensor in enumerate(sent)]
            for each in pending:
                each.wait()
            return torch.empty(0)
        received = [torch.empty(3, 2) for _ in sent]
        pending = [groups[1].post_receive(tensor, 0, tag) for tag, tensor in enumerate(received)]
        for each in reversed(pending):
            each.wait()
        return torch.stack(received)

    assert torch.equal(_both(work)[1], torch.stack(sent))


def test_a_staged_message_may_change_once_it_is_posted():
    sender, receiver = _groups(stages=(True, False))
    tensor = torch.ones(1000)
    pending = sender.send(tensor, 1, 7)
    tensor.zero_()
    received = torch.empty(1000)
    receiver.receive(received, 0, 7)
    pending.wait()
    assert torch.equal(received, torch.ones(1000))


@pytest.mark.parametrize("stages", [(True, True), (True, False)])
def test_sums_are_posted_in_their_order_and_return_to_their_tensors(stages: tuple[bool, bool]):
    groups = _groups(stages=stages)

    def work(rank: int) -> torch.Tensor:
        tensors = [torch.full((5,), float(10 * number + rank)) for number in range(6)]
        sums = [groups[rank].all_reduce(tensor) for tensor in tensors]
        for each in reversed(sums):
            each.wait(lambda: False)
        return torch.stack(tensors)

    expected = torch.stack([torch.full((5,), 20.0 * number + 1) for number in range(6)])
    assert [torch.equal(found, expected) for found in _both(work)] == [True, True]


def test_a_staged_sum_that_the_other_side_never_joins_can_be_given_up():
    group, other = _groups(stages=(True, True))
    is_fenced = threading.Event()
    tensor = torch.ones(3)
    reduction = group.all_reduce(tensor)

    def fence() -> None:
        is_fenced.set()
        group.waiter.announce()

    threading.Timer(0.05, fence).start()
    with pytest.raises(Interrupted):
        reduction.wait(is_fenced.is_set)
    assert torch.equal(tensor, torch.ones(3)), "nothing is copied back of a sum that is not there"
    other.all_reduce(torch.ones(3)).wait(lambda: False)  # a group that is stuck cannot be destroyed


def test_failures_to_post_are_told_to_those_who_wait():
    def refuse(_tensor: torch.Tensor) -> object:
        raise RuntimeError("connection closed by peer")

    courier, announced = Courier("a test's"), threading.Event()
    posting = Posting(HostCopy(torch.ones(1)), refuse)  # type: ignore[arg-type]
    courier.take(posting.run)
    with pytest.raises(RuntimeError, match="closed by peer"):
        posting.wait()
    staged = StagedSum(torch.ones(1), courier, refuse, announced.set)  # type: ignore[arg-type]
    assert announced.wait(10)
    assert staged.is_done()
    with pytest.raises(RuntimeError, match="closed by peer"):
        staged.conclude()
    courier.close()


def test_a_sum_that_is_there_as_soon_as_it_is_posted_wakes_whoever_waits():
    """Whoever looks when it is announced, and only then, sees in the end that it is there."""
    looks: list[bool] = []
    posted, looked = threading.Event(), threading.Event()

    class _DoneAtOnce:
        def get_future(self) -> torch.futures.Future[None]:
            future: torch.futures.Future[None] = torch.futures.Future()
            future.set_result(None)
            return future

    def look() -> None:
        posted.wait(10)
        looks.append(staged.is_done())
        if looks[-1]:
            looked.set()

    courier = Courier("a test's")
    staged = StagedSum(torch.ones(1), courier, lambda _: _DoneAtOnce(), look)  # type: ignore[arg-type, return-value]
    posted.set()
    assert looked.wait(5), looks
    courier.close()


class _FakeNccl:
    """Stands for a group of NCCL's where there is no GPU; it knows who aborted it."""

    def __init__(self) -> None:
        self.aborted_by = ""
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.aborted_by = threading.current_thread().name
        self.is_aborted.set()


def test_what_nccl_has_under_way_is_aborted_on_another_thread_when_a_sum_is_given_up():
    group, other = _groups(stages=(False, False))
    nccl = _FakeNccl()
    other.all_reduce(torch.zeros(1))
    group.use_nccl(nccl, None, torch.zeros(1), 10.0)  # type: ignore[arg-type]  # it needs no store
    with pytest.raises(Interrupted):
        group.all_reduce(torch.ones(1)).wait(lambda: True)
    assert nccl.is_aborted.wait(10)
    assert nccl.aborted_by.startswith("abort ")
    other.all_reduce(torch.ones(1)).wait(lambda: False)  # a group that is stuck cannot be destroyed
    group.close()


def test_whoever_waits_looks_again_where_nobody_tells():
    looks: list[int] = []

    def is_done() -> bool:
        looks.append(1)
        return len(looks) > 20

    Waiter().wait(is_done, lambda: False, poll_s=1e-4)
    assert len(looks) > 20


class _Waiting(Waiter):
    """One that shows that something was announced."""

    def __init__(self) -> None:
        super().__init__()
        self.was_woken = threading.Event()

    def announce(self) -> None:
        super().announce()
        self.was_woken.set()


def test_a_sum_of_gloos_announces_that_it_is_there():
    groups = _groups(stages=(False, False), waiters=_Waiting)

    def work(rank: int) -> torch.Tensor:
        tensor = torch.ones(2)
        waiter = groups[rank].waiter
        assert isinstance(waiter, _Waiting)
        waiter.was_woken.clear()  # by the forming of the group
        reduction = groups[rank].all_reduce(tensor)
        assert waiter.was_woken.wait(10)
        assert reduction.poll_s is None
        assert reduction.is_done()
        reduction.wait(lambda: False)
        return tensor

    assert [found.tolist() for found in _both(work)] == [[2.0, 2.0]] * 2
