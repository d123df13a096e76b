"""What tensors of a GPU go through, with the CPU's: copied, handed over, posted in order, received, copied back."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from oobleck.control.steps import GroupKey
from oobleck.control.steps.commit_state import Interrupted
from oobleck.planner import WorkerId
from oobleck.planner.costs import MESSAGES_AT_A_CUT
from oobleck.training.comm.group import Group
from oobleck.training.comm.inbox import RECEIVES_AHEAD, Inbox
from oobleck.training.comm.staging import CopyStreams, Courier, HostCopy, Posting, StagedReceive, StagedSum
from oobleck.training.comm.waiter import Waiter
from tests.training.fake_cuda import FakeCuda
from tests.training.table import LinkedTable, acquaint

PLACES = tuple(WorkerId(node=node, device=0) for node in "ab")
KEY = GroupKey("pipeline", 1, PLACES)
CPU = torch.device("cpu")


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


@pytest.mark.parametrize("is_staged", [True, False])
def test_members_send_each_other_as_many_rows_as_they_say(*, is_staged: bool):
    """The second sends nothing to the first."""
    groups = _groups(stages=(is_staged, is_staged))
    counts = [[1, 2], [0, 3]]
    rows = [torch.tensor([[-0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]), torch.tensor([[6.0, -0.0], [7.0, 8.0], [9.0, 0.0]])]

    def work(rank: int) -> torch.Tensor:
        posted, taken = groups[rank].all_to_all(rows[rank], counts)
        posted.join(lambda: False)
        return taken()

    expected = [rows[0][:1], torch.cat([rows[0][1:], rows[1]])]
    for found, each in zip(_both(work), expected, strict=True):
        assert torch.equal(found, each)
        assert torch.equal(found.signbit(), each.signbit())
    unanswered, _ = groups[0].all_to_all(rows[0], counts)
    with pytest.raises(Interrupted):
        unanswered.join(lambda: True)


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

    courier, announced = Courier("a test's", CPU), threading.Event()
    posting = Posting(HostCopy(torch.ones(1)), refuse)  # type: ignore[arg-type]
    courier.take(posting.run)
    with pytest.raises(RuntimeError, match="closed by peer"):
        posting.wait()
    staged = StagedSum(HostCopy(torch.ones(1)), torch.ones(1), courier, refuse, announced.set)  # type: ignore[arg-type]
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

    courier = Courier("a test's", CPU)
    staged = StagedSum(HostCopy(torch.ones(1)), torch.ones(1), courier, lambda _: _DoneAtOnce(), look)  # type: ignore[arg-type, return-value]
    posted.set()
    assert looked.wait(5), looks
    courier.close()


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


def _until(ready: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end_s
        time.sleep(1e-3)


def _num_copies() -> int:
    return sum(type(each) in (HostCopy, Posting) for each in gc.get_objects())


def test_what_is_sent_off_is_kept_no_longer_than_until_the_receiver_has_it():
    """A step sends as much as it has microbatches; a GPU has room for those in flight."""
    sender, receiver = _groups(stages=(True, False))
    before, sent = _num_copies(), []
    for tag in range(8):
        tensor = torch.full((100,), float(tag))
        sent.append(weakref.ref(tensor))
        assert sender.send_off(tensor, 1, tag) is None, "nothing for the step to keep"
        del tensor
    _until(lambda: all(ref() is None for ref in sent))
    received = torch.empty(100)
    for tag in range(8):
        receiver.receive(received, 0, tag)
        assert received[0] == tag
    _until(lambda: _num_copies() == before)


def test_a_send_that_is_not_taken_yet_holds_up_no_other():
    sender, receiver = _groups(stages=(True, False))
    for tag in (1, 2):
        sender.send_off(torch.full((1 << 20,), float(tag)), 1, tag)
    received = torch.empty(1 << 20)
    for tag in (2, 1):
        receiver.receive(received, 0, tag)
        assert received[0] == tag


def test_copies_run_on_streams_of_their_own_beside_what_is_computed(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda(monkeypatch)
    streams = CopyStreams(torch.device("cuda", 1))
    HostCopy(torch.ones(3), streams).wait()
    assert cuda.log == [
        "stream 1 waits for computing",
        "copy on stream 1",
        "memory in use on stream 1",
        "MainThread waits for an event of stream 1",
    ], "what computes waits for nothing"
    assert cuda.priorities == {"stream 1": -1, "stream 2": -1}, "sums have others: none can share a stream with these"


class _Arrived:
    def __init__(self, room: torch.Tensor) -> None:
        room.fill_(5.0)

    def wait(self) -> bool:
        return True


def test_what_arrives_is_copied_beside_what_is_computed_and_waited_for_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
):
    cuda = FakeCuda(monkeypatch)
    streams = CopyStreams(torch.device("cuda", 1))
    inbox = Inbox(PLACES[1], Waiter(torch.device("cuda", 1)))
    target = streams.room((3,), torch.float32)
    inbox.expect(1, lambda _: (StagedReceive(target, _Arrived, streams), target))  # type: ignore[arg-type]
    _until(inbox.has_arrived)
    assert cuda.log == ["copy on stream 2"], "what computes does not wait before it uses it"
    assert inbox.take(lambda: False).tolist() == [5.0] * 3
    assert cuda.log[1:] == ["computing waits for an event of stream 2", "memory in use on computing"]
    inbox.close()


def test_threads_that_copy_do_so_on_their_workers_device(monkeypatch: pytest.MonkeyPatch):
    """A thread that is not told computes on the first GPU, and makes a context there, in another worker's memory."""
    cuda, mine = FakeCuda(monkeypatch), torch.device("cuda", 3)
    waiter = Waiter(mine)
    courier, inbox = Courier("a courier", mine), Inbox(PLACES[1], waiter)
    assert waiter.call(lambda: threading.current_thread().name, lambda: False) == "abandonable"
    _until(lambda: len(cuda.computes_on) == 3)
    assert cuda.computes_on == {"a courier": mine, f"receive from {PLACES[1]}": mine, "abandonable": mine}
    courier.close()
    inbox.close()


def test_a_plan_has_room_for_what_is_received_ahead_and_one_message_more():
    assert MESSAGES_AT_A_CUT == RECEIVES_AHEAD + 1
