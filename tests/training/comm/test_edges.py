"""Messages between stages that NCCL carries, with fakes of NCCL and CUDA: whole, in order, and given up at once."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.steps import GroupKey, Interrupted, PeerLost
from oobleck.planner import WorkerId
from oobleck.schedule import Op, ScheduleKind, compile_schedule
from oobleck.training.comm.devices import NCCL_SETTINGS
from oobleck.training.comm.group import Group
from oobleck.training.comm.nccl_groups import TorchNccl, communicators_of
from oobleck.training.comm.staging import Pending
from oobleck.training.comm.waiter import Waiter
from tests.training.comm.fake_nccl import FakeLibrary, FakeNccl
from tests.training.fake_cuda import FakeCuda
from tests.training.table import LinkedTable, acquaint

GPU = torch.device("cuda", 0)
SHAPE = (4, 3)
A, B, C, D = (WorkerId(node=node, device=0) for node in "abcd")


def never() -> bool:
    return False


def until(ready: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end_s
        time.sleep(1e-3)


def key_of(*members: WorkerId) -> GroupKey:
    return GroupKey("pipeline", 1, members)


class Pipeline:
    """Stages in this process, one to a worker, each with a GPU, and the groups that link them."""

    def __init__(self, members: Sequence[WorkerId], *, identities: Sequence[str | None] = (), degree: int = 1) -> None:
        self.key = key_of(*members)
        self.libraries = FakeLibrary.of(identities or [f"gpu {worker_id}" for worker_id in members])
        self.tables = [
            LinkedTable(worker_id, waiter=Waiter(GPU), stages=True, degree=degree, library=library)
            for worker_id, library in zip(members, self.libraries, strict=True)
        ]
        acquaint(self.tables)
        self.form([self.key], generation=1)
        self.groups = [table.groups[self.key] for table in self.tables]

    def form(self, keys: Sequence[GroupKey], *, generation: int) -> None:
        with ThreadPoolExecutor(len(self.tables)) as pool:
            list(pool.map(lambda table: table.groups.form(keys, never, generation=generation), self.tables))

    def end(self, at: int, source: int, target: int) -> FakeNccl:
        """A member's end of a way."""
        return self.libraries[at].joined[f"{self.key.name}/nccl/{source}-{target}"]

    def close(self) -> None:
        for table in self.tables:
            table.groups.keep_only([], generation=99)
            table.links.close()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def two(cuda: FakeCuda) -> Iterator[Pipeline]:
    pipeline = Pipeline([A, B])
    yield pipeline
    pipeline.close()


@pytest.fixture
def died() -> Iterator[list[BaseException | None]]:
    """What would have ended the worker: an exception that its thread did not catch."""
    found: list[BaseException | None] = []
    before, threading.excepthook = threading.excepthook, lambda failed: found.append(failed.exc_value)
    yield found
    threading.excepthook = before


def expect(group: Group, source: int, tag: int) -> None:
    group.inbox(source).expect(tag, lambda tag: group.post_receive_ahead(SHAPE, torch.bfloat16, GPU, source, tag))


def tensor_of(value: float) -> torch.Tensor:
    return torch.full(SHAPE, value, dtype=torch.bfloat16)


# --- which communicators, in which order ------------------------------------------------------------------------------


@given(
    num_stages=st.integers(2, 7),
    degree=st.sampled_from([1, 2]),
    num_pipelines=st.integers(1, 3),
    seed=st.randoms(use_true_random=False),
)
def test_workers_that_open_their_communicators_one_by_one_never_wait_in_a_circle(
    num_stages: int, degree: int, num_pipelines: int, seed: object
) -> None:
    pipelines = [
        tuple(WorkerId(node=f"n{at}.{stage}", device=rank) for stage in range(num_stages) for rank in range(degree))
        for at in range(num_pipelines)
    ]
    keys = [GroupKey("pipeline", 1 + at % 2, members) for at, members in enumerate(pipelines)]
    keys += [GroupKey("reduce", 2, tuple(members[at] for members in pipelines)) for at in range(len(pipelines[0]))]
    keys.append(GroupKey("reduce", 2, (pipelines[0][0], pipelines[0][-1])))
    workers = [worker_id for members in pipelines for worker_id in members]
    left = {
        worker_id: communicators_of([key for key in keys if worker_id in key.members], worker_id, degree=degree)
        for worker_id in workers
    }
    while any(left.values()):
        first = {worker_id: wanted[0] for worker_id, wanted in left.items() if wanted}
        ready = {
            wanted
            for wanted in first.values()
            if all(first.get(wanted.key.members[rank]) == wanted for rank in wanted.ranks)
        }
        assert ready, "all wait"
        for worker_id, wanted in first.items():
            if wanted in ready:
                left[worker_id].pop(0)


def test_a_pipeline_of_any_length_opens_its_edges_in_four_turns():
    for num_stages in (2, 3, 16):
        members = [WorkerId(node=f"n{stage}", device=0) for stage in range(num_stages)]
        left = {worker_id: communicators_of([key_of(*members)], worker_id, degree=1) for worker_id in members}
        turns = 0
        while any(left.values()):
            turns += 1
            first = {worker_id: wanted[0] for worker_id, wanted in left.items() if wanted}
            for worker_id, wanted in first.items():
                if all(first.get(members[rank]) == wanted for rank in wanted.ranks):
                    left[worker_id].pop(0)
        assert turns == (2 if num_stages == 2 else 4)


def test_devices_that_share_a_stage_have_edges_to_their_like_alone():
    members = tuple(WorkerId(node=node, device=device) for node in "abc" for device in range(2))
    wanted = communicators_of([key_of(*members)], members[3], degree=2)
    assert [each.ranks for each in wanted] == [(1, 3), (3, 1), (3, 5), (5, 3)]


@pytest.mark.parametrize(
    ("identities", "ways"),
    [
        (["0", "1", "2"], ["0-1", "1-0", "1-2", "2-1"]),
        (["0", "0", "2"], ["1-2", "2-1"]),
        (["0", "1", None], ["0-1", "1-0"]),
        (["0", "0", "0"], []),
    ],
)
def test_an_edge_between_two_gpus_has_nccl_and_all_others_gloo(
    cuda: FakeCuda, identities: list[str | None], ways: list[str]
) -> None:
    pipeline = Pipeline([A, B, C], identities=identities)
    assert [name.split("/")[-1] for name in pipeline.libraries[1].joined] == ways
    for at, target in ((0, 1), (1, 2)):
        expect(pipeline.groups[target], at, 5)
        pipeline.groups[at].send_off(tensor_of(at), target, 5)
        assert torch.equal(pipeline.groups[target].inbox(at).take(never), tensor_of(at)), "with either carrier"
    pipeline.close()


def test_a_worker_that_shares_its_gpu_asks_for_no_nccl(cuda: FakeCuda) -> None:
    libraries = FakeLibrary.of(["0", "1"])
    tables = [
        LinkedTable(worker_id, waiter=Waiter(GPU), owns_device=worker_id == A, library=library)
        for worker_id, library in zip((A, B), libraries, strict=True)
    ]
    acquaint(tables)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda table: table.groups.form([key_of(A, B)], never, generation=1), tables))
    assert [library.joined for library in libraries] == [{}, {}]
    for table in tables:
        table.groups.keep_only([], generation=2)
        table.links.close()


def test_on_gpus_no_group_is_formed_beside_what_is_computed(cuda: FakeCuda) -> None:
    tables = [LinkedTable(worker_id, waiter=Waiter(GPU), owns_device=False) for worker_id in (A, B)]
    acquaint(tables)
    key = GroupKey("reduce", 1, (A, B))
    with ThreadPoolExecutor(2) as pool:
        formed = list(pool.map(lambda table: table.groups.form([], never, generation=1, beside=[key]), tables))
    assert formed == [False, False]
    for table in tables:
        assert table.groups[key].others
        table.groups.keep_only([], generation=2)
        table.links.close()


def test_ways_have_few_blocks_of_the_gpu_and_streams_that_no_sum_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(max_ctas=None)

    class Kind:
        def __init__(self, _store: object, rank: int, size: int, options: Options) -> None:
            self.found = rank, size, options.is_high_priority_stream, options.config.max_ctas

    Kind.Options = Options
    for name in (*NCCL_SETTINGS, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "0")  # so that it is put back
    monkeypatch.setitem(vars(dist), "ProcessGroupNCCL", Kind)
    way, total = (TorchNccl("127.0.0.1").join("name", None, 1, 2, is_way=is_way) for is_way in (True, False))
    assert way.found == (1, 2, True, 2)
    assert total.found == (1, 2, False, None)


@pytest.mark.usefixtures("cuda")
def test_sums_connect_by_the_largest_bucket_before_the_first_step() -> None:
    """NCCL connects an algorithm on its first use, and nothing could end that in the middle of a step."""
    key = GroupKey("reduce", 1, (A, B))
    libraries = FakeLibrary.of(["gpu 0", "gpu 1"])
    tables = [
        LinkedTable(worker_id, waiter=Waiter(GPU), stages=True, library=library)
        for worker_id, library in zip((A, B), libraries, strict=True)
    ]
    acquaint(tables)
    with ThreadPoolExecutor(2) as pool:
        forming = [
            pool.submit(table.groups.form, [], never, generation=1, beside=[key], largest={key: 5 << 20})
            for table in tables
        ]
        for each in forming:
            each.result(20)
    (fake,) = libraries[0].joined.values()
    assert [work.tensor.numel() for work in fake.works] == [1, 2 << 20, 5 << 20]
    for table in tables:
        table.groups.keep_only([], generation=99)
        table.links.close()


# --- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE])
def test_each_stage_gets_what_its_neighbours_sent_in_the_order_of_their_programs(
    cuda: FakeCuda, kind: ScheduleKind
) -> None:
    """Two steps of real programs, with stages that take their time."""
    pipeline = Pipeline([A, B, C])
    programs = compile_schedule(kind, num_stages=3, num_microbatches=7).programs

    def value(op: Op, stage: int, microbatch: int, step: int) -> float:
        return float(64 * step + 32 * (op is Op.SEND_B) + 8 * stage + microbatch)

    def run(stage: int) -> int:
        group, taken = pipeline.groups[stage], 0
        for step in range(2):
            for instruction in programs[stage]:
                op, microbatch = instruction.op, instruction.microbatch
                if op in (Op.RECV_F, Op.RECV_B):
                    assert microbatch is not None
                    expect(group, stage - 1 if op is Op.RECV_F else stage + 1, 2 * microbatch + (op is Op.RECV_B))
            for instruction in programs[stage]:
                op, microbatch = instruction.op, instruction.microbatch
                if microbatch is None:
                    continue
                if op in (Op.SEND_F, Op.SEND_B):
                    tensor = tensor_of(value(op, stage, microbatch, step))
                    target = stage + 1 if op is Op.SEND_F else stage - 1
                    assert group.send_off(tensor, target, 2 * microbatch + (op is Op.SEND_B)) is None
                elif op in (Op.RECV_F, Op.RECV_B):
                    source, sent_by = (stage - 1, Op.SEND_F) if op is Op.RECV_F else (stage + 1, Op.SEND_B)
                    found = group.inbox(source).take(never)
                    assert found.dtype == torch.bfloat16
                    assert torch.equal(found, tensor_of(value(sent_by, source, microbatch, step))), instruction
                    taken += 1
                    time.sleep(0.002 * (stage == 1))
        return taken

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [14, 28, 14]
    until(lambda: not any(end.num_spinning for library in pipeline.libraries for end in library.joined.values()))
    pipeline.close()


def test_a_message_waits_for_what_computes_it_and_what_computes_waits_for_no_message(
    cuda: FakeCuda, two: Pipeline
) -> None:
    """It leaves on a stream of its own; memory that it arrived in is not given out again before it was used."""
    streams: list[str] = []
    for at, end in enumerate((two.end(0, 0, 1), two.end(1, 0, 1))):
        end.on_launch = lambda kind, at=at: streams.append(f"{at} {kind} on {cuda.current_stream().name}")
    expect(two.groups[1], 0, 4)
    cuda.log.clear()
    two.groups[0].send_off(tensor_of(1.0), 1, 4)
    assert two.groups[1].inbox(0).take(never)[0, 0] == 1.0
    assert sorted(streams) == ["0 send on stream 1", "1 receive on stream 4"], (
        "the first GPU's way out, the second's in"
    )
    assert f"send to {B} waits for an event of computing" in cuda.log
    assert cuda.log[-1] == "memory in use on computing"
    assert not [line for line in cuda.log if line.startswith("computing waits")]


def test_nothing_is_launched_before_both_sides_are_ready(two: Pipeline) -> None:
    """A kernel that spins while the other side computes holds up all that waits for the whole device."""
    sent, received = two.end(0, 0, 1), two.end(1, 0, 1)
    num_connecting = len(sent.works)
    for tag in range(4):
        expect(two.groups[1], 0, tag)
    time.sleep(0.05)
    assert len(received.works) == num_connecting, "the sender has nothing yet"
    for tag in range(4):
        two.groups[0].send_off(tensor_of(tag), 1, tag)
    until(lambda: len(sent.works) == num_connecting + 2)
    time.sleep(0.05)
    assert len(sent.works) == num_connecting + 2, "the receiver has room for two"
    assert sent.device_synchronize(0.0), "and none spins"
    assert [float(two.groups[1].inbox(0).take(never)[0, 0]) for _ in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_a_sent_tensor_is_let_go_once_it_is_sent(two: Pipeline) -> None:
    tensor = tensor_of(3.0)
    sent = weakref.ref(tensor)
    two.groups[0].send_off(tensor, 1, 8)
    del tensor
    assert sent() is not None
    expect(two.groups[1], 0, 8)
    two.groups[1].inbox(0).take(never)
    until(lambda: gc.collect() >= 0 and two.end(0, 0, 1).works.clear() is None and sent() is None)


# --- what is given up -------------------------------------------------------------------------------------------------


class Fence:
    """A fence that a test raises."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._is_up = threading.Event()

    def is_up(self) -> bool:
        return self._is_up.is_set()

    def raise_(self) -> None:
        self._is_up.set()
        self._group.waiter.announce()


def frozen_sender(two: Pipeline, tag: int) -> None:
    """The sender says that a message is coming, and freezes before it launches it."""
    two.groups[0].receive(torch.empty(1, dtype=torch.uint8), 1, tag)
    two.groups[0].send(torch.zeros(1, dtype=torch.uint8), 1, tag).wait()


def frozen_receiver(two: Pipeline, tag: int) -> list[Pending]:
    """The receiver says that it has room, and freezes before it launches anything; returns what must be kept."""
    heard = two.groups[1].post_receive(torch.empty(1, dtype=torch.uint8), 0, tag)
    return [heard, two.groups[1].send(torch.zeros(1, dtype=torch.uint8), 0, tag)]


def test_a_receive_that_is_aborted_frees_its_thread_and_its_part_of_the_data_is_never_used(
    two: Pipeline, died: list[BaseException | None]
) -> None:
    group, fence, end = two.groups[1], Fence(two.groups[1]), two.end(1, 0, 1)
    expect(group, 0, 6)
    frozen_sender(two, 6)
    until(lambda: end.num_spinning)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(group.inbox(0).take, fence.is_up)
        fence.raise_()  # as a fence is: first it is up, then what it stops is aborted
        two.tables[1].groups.abort_fenced(is_pipeline_stopped=True)
        with pytest.raises(Interrupted):
            taking.result(20)
    until(lambda: end.is_aborted)
    assert end.device_synchronize(20.0)
    until(lambda: not any(thread.name == f"receive from {A}" for thread in threading.enumerate()))
    assert not group.inbox(0).has_arrived(), "the part that is there is nothing"
    assert died == []


def test_a_send_that_is_aborted_frees_its_thread_and_its_tensor(
    two: Pipeline, died: list[BaseException | None]
) -> None:
    end, frozen = two.end(0, 0, 1), frozen_receiver(two, 6)
    two.groups[0].send_off(tensor_of(2.0), 1, 6)
    until(lambda: end.num_spinning)
    two.tables[0].groups.abort_fenced(is_pipeline_stopped=True)
    until(lambda: end.is_aborted)
    assert end.device_synchronize(20.0)
    two.groups[0].send_off(tensor_of(3.0), 1, 8)  # a worker that does not know yet
    two.tables[0].groups.keep_only([], generation=2)
    until(lambda: not any(thread.name == f"send to {B}" for thread in threading.enumerate()))
    assert len(end.works) == 2, "nothing is launched after an abort"
    assert died == []
    del frozen


def test_a_peer_that_is_gone_before_it_sends_leaves_nothing_on_the_gpu(two: Pipeline) -> None:
    """Its connection ends; no kernel of ours has been launched for it."""
    num_launched = len(two.end(1, 0, 1).works)
    expect(two.groups[1], 0, 6)
    two.tables[0].groups.keep_only([], generation=2)
    with pytest.raises(PeerLost):
        two.groups[1].inbox(0).take(never)
    assert len(two.end(1, 0, 1).works) == num_launched


def test_an_error_of_ncclls_own_is_a_lost_peer(two: Pipeline) -> None:
    expect(two.groups[1], 0, 6)
    frozen_sender(two, 6)
    until(lambda: two.end(1, 0, 1).num_spinning)
    two.end(1, 0, 1).fail(RuntimeError("NCCL error: remote process exited or there was a network error"))
    with pytest.raises(PeerLost, match="remote process exited"):
        two.groups[1].inbox(0).take(never)


def test_a_send_that_failed_is_reported_with_the_next(two: Pipeline) -> None:
    frozen = frozen_receiver(two, 6)
    two.groups[0].send_off(tensor_of(2.0), 1, 6)
    until(lambda: two.end(0, 0, 1).num_spinning)
    two.end(0, 0, 1).fail(RuntimeError("NCCL error: unhandled system error"))
    until(lambda: two.end(0, 0, 1).num_aborts)
    with pytest.raises(PeerLost, match="unhandled system error"):
        two.groups[0].send_off(tensor_of(3.0), 1, 8)
    del frozen


@pytest.mark.parametrize("error", [torch.AcceleratorError("CUDA error: uncorrectable ECC error")])
def test_a_device_that_fails_in_a_message_ends_its_own_worker(
    two: Pipeline, died: list[BaseException | None], error: RuntimeError
) -> None:
    expect(two.groups[1], 0, 6)
    frozen_sender(two, 6)
    until(lambda: two.end(1, 0, 1).num_spinning)
    two.end(1, 0, 1).fail(error)
    until(lambda: died)
    assert died == [error]


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_whole_pipeline_keeps_its_edges_through_a_fence_and_into_the_next_plan(two: Pipeline) -> None:
    """Another pipeline has lost a node: what is under way here arrives, and nothing is opened again."""
    expect(two.groups[1], 0, 6)
    two.groups[0].send_off(tensor_of(2.0), 1, 6)
    for table in two.tables:
        table.groups.abort_fenced(is_pipeline_stopped=False)
        table.groups.abort_sums()  # the training thread looks for its next plan
    assert two.groups[1].inbox(0).take(never)[0, 0] == 2.0
    before = [list(library.joined.values()) for library in two.libraries]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(_next_plan, key=two.key), two.tables))
    assert [list(library.joined.values()) for library in two.libraries] == before
    assert not any(end.num_aborts for ends in before for end in ends)
    expect(two.groups[0], 1, 7)
    two.groups[1].send_off(tensor_of(5.0), 0, 7)
    assert two.groups[0].inbox(1).take(never)[0, 0] == 5.0


def _next_plan(table: LinkedTable, *, key: GroupKey) -> None:
    table.groups.form([key], never, generation=2)
    table.groups.keep_only([key], generation=2)


def test_a_pipeline_that_is_put_aside_ends_its_communicators(two: Pipeline) -> None:
    ends = [end for library in two.libraries for end in library.joined.values()]
    assert len(ends) == 4
    for table in two.tables:
        table.groups.keep_only([], generation=2)
    until(lambda: all(end.is_aborted for end in ends))


def test_edges_that_are_given_up_while_they_connect_are_aborted_once_they_can_be(cuda: FakeCuda) -> None:
    """The other end comes late; until then torch does not know the communicator that `abort` should end."""
    libraries = FakeLibrary.of(["0", "1"])
    tables = [
        LinkedTable(worker_id, waiter=Waiter(GPU), library=library)
        for worker_id, library in zip((A, B), libraries, strict=True)
    ]
    acquaint(tables)
    key, is_fenced = key_of(A, B), threading.Event()
    late = threading.Event()
    plain_join = libraries[1].join

    def join_late(name: str, store: object, rank: int, size: int, *, is_way: bool) -> object:
        late.wait(20)
        return plain_join(name, store, rank, size, is_way=is_way)

    libraries[1].join = join_late  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        forming = [pool.submit(table.groups.form, [key], is_fenced.is_set, generation=1) for table in tables]
        until(lambda: any(end.world.come for end in libraries[0].joined.values()))
        is_fenced.set()
        tables[0].waiter.announce()
        with pytest.raises(Interrupted):
            forming[0].result(20)
        (end,) = libraries[0].joined.values()
        assert not end.is_aborted
        late.set()
        until(lambda: end.is_aborted)
        tables[1].waiter.announce()
        with pytest.raises((Interrupted, PeerLost)):
            forming[1].result(20)
    assert list(libraries[0].joined) == [f"{key.name}/nccl/0-1"], "nothing else is opened"
    for table in tables:
        table.links.close()
