"""Sums that NCCL carries, with a fake that has its manners: they are whole, or nobody takes them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch

from oobleck.control.steps import GroupKey, Interrupted, PeerLost
from oobleck.planner import WorkerId
from oobleck.training.comm.devices import prepare_nccl
from oobleck.training.comm.group import Group
from oobleck.training.comm.nccl import NcclGroup
from oobleck.training.comm.stage_sums import StageSums
from oobleck.training.comm.waiter import Waiter
from oobleck.training.step.reduction import Bucket, GradientReducer
from tests.training.comm.fake_nccl import FakeNccl
from tests.training.table import LinkedTable, acquaint

A, B = (WorkerId(node=node, device=0) for node in "ab")
KEY = GroupKey("reduce", 1, (A, B))
CPU = torch.device("cpu")


def never() -> bool:
    return False


def group_of(worker_id: WorkerId, key: GroupKey = KEY) -> Group:
    """A group in which nothing but NCCL carries anything."""
    return Group(key, worker_id, None, None, Waiter())  # type: ignore[arg-type]


def nccl_of(group: Group, fake: FakeNccl) -> NcclGroup:
    return NcclGroup(group.key.name, group.key.members[group.rank], CPU, fake, None)  # type: ignore[arg-type]


def connected() -> tuple[tuple[Group, Group], tuple[FakeNccl, ...]]:
    """A group of two members, seen from both, and what carries its sums."""
    groups, fakes = (group_of(A), group_of(B)), FakeNccl.join(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda group, fake: group.use_nccl(nccl_of(group, fake), 10.0), groups, fakes))
    return groups, fakes


def until(ready: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end_s
        time.sleep(1e-3)


@pytest.fixture
def died() -> Iterator[list[BaseException | None]]:
    """What would have ended the worker: an exception that its thread did not catch."""
    found: list[BaseException | None] = []
    before, threading.excepthook = threading.excepthook, lambda failed: found.append(failed.exc_value)
    yield found
    threading.excepthook = before


# --- B1 ------------------------------------------------------------------------------------------------------------


def test_a_group_connects_and_sums_without_asking_for_what_torch_refuses():
    groups, fakes = connected()
    tensors = [torch.full((3,), 1.0 + rank) for rank in range(2)]
    reductions = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
    for reduction in reductions:
        reduction.wait(never)
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3] * 2
    assert [len(fake.works) for fake in fakes] == [3, 3], "a small and a large sum connect, before the first of all"
    assert fakes[0].works[1].tensor.numel() > 1 << 20


def test_an_error_of_ncclls_own_is_a_lost_peer_and_ends_the_group():
    (one, _), (fake, _) = connected()
    reduction = one.all_reduce(torch.ones(2))
    fake.fail(RuntimeError("NCCL error: remote process exited or there was a network error"))
    with pytest.raises(PeerLost, match="remote process exited"):
        reduction.wait(never)
    until(lambda: fake.is_aborted)


def test_a_sum_that_failed_is_aborted_on_no_thread_that_waits_for_it():
    """An abort may wait for other communicators, whose aborts this thread may have to allow."""
    (one, _), (fake, _) = connected()
    others_have_ended = threading.Event()

    def abort() -> None:
        assert others_have_ended.wait(20.0)

    fake.on_abort = abort
    reduction = one.all_reduce(torch.ones(2))
    fake.fail(RuntimeError("NCCL error: remote process exited or there was a network error"))
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="remote process exited"):
        reduction.wait(never)
    assert time.monotonic() - began_s < 10.0
    others_have_ended.set()
    until(lambda: fake.is_aborted)


# --- B4 ------------------------------------------------------------------------------------------------------------


def test_what_an_aborted_sum_has_left_is_never_taken_for_the_sum():
    (one, _), (fake, _) = connected()
    tensor = torch.ones(2)
    reduction = one.all_reduce(tensor)
    assert one.has_open_sums
    one.abort()
    until(lambda: fake.is_aborted)
    assert reduction.is_done()
    assert tensor.tolist() == [1.0, 1.0], "complete, without an error, and without the other's part"
    with pytest.raises(Interrupted):
        reduction.wait(never)
    assert fake.works[-1].error is None


def test_nothing_is_posted_in_a_group_that_was_aborted():
    (one, _), (fake, _) = connected()
    one.abort()
    num_posted = len(fake.works)
    with pytest.raises(Interrupted):
        one.all_reduce(torch.ones(2))
    assert len(fake.works) == num_posted


def test_an_abort_that_fails_does_not_end_a_healthy_worker(died: list[BaseException | None]):
    (one, _), (fake, _) = connected()
    fake.abort_error = RuntimeError("ProcessGroup abort: an exception was thrown")
    one.abort()
    until(lambda: fake.num_aborts)
    until(lambda: not any(thread.name.startswith("abort ") for thread in threading.enumerate()))
    assert died == []


# --- B8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error: uncorrectable ECC error"), torch.OutOfMemoryError("CUDA")]
)
def test_a_device_that_fails_is_not_blamed_on_peers(error: RuntimeError):
    (one, _), (fake, _) = connected()
    reduction = one.all_reduce(torch.ones(2))
    fake.fail(error)
    with pytest.raises(type(error)):
        reduction.wait(never)


def test_a_device_that_fails_while_it_is_aborted_ends_its_worker(died: list[BaseException | None]):
    (one, _), (fake, _) = connected()
    fake.abort_error = torch.AcceleratorError("CUDA error: unspecified launch failure")
    one.abort()
    until(lambda: died)
    assert isinstance(died[0], torch.AcceleratorError)


# --- B3 ------------------------------------------------------------------------------------------------------------


def test_a_fence_ends_all_that_spins_while_the_training_thread_is_stuck():
    """Without it, a thread that waits for the whole device waits for kernels that nobody aborts."""
    tables = [LinkedTable(worker_id) for worker_id in (A, B)]
    acquaint(tables)
    keys = [GroupKey(*key, (A, B)) for key in (("reduce", 1), ("reduce", 2), ("stage", 1), ("stage", 2))]
    fakes = {key: FakeNccl.join(2) for key in keys}

    def form(rank: int) -> None:
        groups = tables[rank].groups
        groups.form(keys, never, generation=1)
        for key in keys:
            groups[key].use_nccl(nccl_of(groups[key], fakes[key][rank]), 10.0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(form, range(2)))
    groups = tables[0].groups
    for key in (keys[0], keys[2]):
        groups[key].all_reduce(torch.ones(2))
    mine = [fakes[key][0] for key in keys]
    with ThreadPoolExecutor(2) as pool:
        stuck = [pool.submit(partial(fake.device_synchronize, 20.0)) for fake in (mine[0], mine[2])]
        groups.abort_fenced(is_pipeline_stopped=False)
        assert stuck[0].result()
        assert not mine[2].is_aborted, "a whole pipeline needs it, to finish its microbatches"
        assert not mine[3].is_aborted
        groups.abort_fenced(is_pipeline_stopped=True)
        assert stuck[1].result()
    until(lambda: mine[3].is_aborted)  # the training thread may be about to launch a sum that nobody would abort
    assert not mine[1].is_aborted, "nothing is open there: the next plan may keep it"


def test_a_reduction_that_is_interrupted_gives_up_all_its_groups():
    keys = [GroupKey("reduce", generation, (A, B)) for generation in (1, 2)]
    fakes = [FakeNccl.join(2) for _ in keys]
    groups = {key: group_of(A, key) for key in keys}
    for key, (mine, other) in zip(keys, fakes, strict=True):
        nccl = nccl_of(groups[key], mine)
        with ThreadPoolExecutor(2) as pool:
            pool.submit(groups[key].use_nccl, nccl, 10.0)
            pool.submit(nccl_of(group_of(B, key), other).connect, 2 << 20, 10.0)
    buckets = [Bucket(key=key, parameters=(name,)) for key, name in zip(keys, "pq", strict=True)]
    parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in "pq"}
    reducer = GradientReducer(buckets, parameters, groups)  # type: ignore[arg-type]  # all it does is look them up
    reducer.begin({})
    with pytest.raises(Interrupted):
        reducer.finish(lambda: True)
    until(lambda: all(mine.is_aborted for mine, _ in fakes))


# --- sums that the host does not wait for ---------------------------------------------------------------------------


class Event:
    """The end of what a thread has launched so far, which a test brings about."""

    def __init__(self) -> None:
        self.has_come = threading.Event()

    def synchronize(self) -> None:
        assert self.has_come.wait(20)


class Streams:
    def __init__(self) -> None:
        self.marks: list[Event] = []

    def mark(self) -> Event:
        self.marks.append(Event())
        return self.marks[-1]

    def outward(self) -> AbstractContextManager[object]:
        return nullcontext()


def stage_and_sum() -> tuple[Group, Group, Streams, tuple[FakeNccl, FakeNccl], tuple[FakeNccl, FakeNccl]]:
    """One member's groups of a stage and of owners of gradients, and what carries the sums of both members."""
    streams, groups, fakes = Streams(), [], []
    for purpose in ("stage", "reduce"):
        key = GroupKey(purpose, 1, (A, B))
        mine, other = (Group(key, each, None, None, Waiter(), streams=streams) for each in (A, B))  # type: ignore[arg-type]
        pair = FakeNccl.join(2)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda group, fake: group.use_nccl(nccl_of(group, fake), 10.0), (mine, other), pair))
        groups.append(mine)
        fakes.append(pair)
    return groups[0], groups[1], streams, fakes[0], fakes[1]


def test_the_host_goes_on_before_a_sum_in_order_is_there():
    stage, _, _, (mine, other), _ = stage_and_sum()
    parts = [torch.full((2,), float(number)) for number in range(3)]
    for part in parts:
        stage.all_reduce(part).join(never)
    assert mine.num_spinning == 3
    assert stage.has_open_sums, "a fence has to end it"
    assert stage.waiter.mark.begun == 0
    for _ in parts:
        other.allreduce([torch.ones(2)], None)
    stage.conclude_in_order()
    assert [part.tolist() for part in parts] == [[number + 1.0] * 2 for number in range(3)]
    assert not stage.has_open_sums, "the next plan may keep it"


def test_rows_are_sent_in_order_and_numbers_read_of_an_aborted_stage_pass_for_nothing():
    stage, _, _, (mine, other), _ = stage_and_sum()
    sums = StageSums(never)
    sums.adopt(stage)
    taken = sums.exchange(torch.tensor([[1.0], [2.0]]), [[1, 1], [1, 1]])
    assert mine.num_spinning == 1, "the host does not wait"
    other.alltoall_base(torch.zeros(2, 1), torch.tensor([[3.0], [4.0]]), [1, 1], [1, 1], None)
    assert sums.read(taken) == [[1.0], [3.0]]
    stage.abort()
    with pytest.raises(Interrupted):
        sums.read(taken)


def test_of_sums_in_order_only_the_newest_keeps_its_tensor():
    stage, _, _, (mine, _), _ = stage_and_sum()
    parts = [torch.ones(2) for _ in range(3)]
    seen = [weakref.ref(part) for part in parts]
    for part in parts:
        stage.all_reduce(part).join(never)
    del part
    mine.works.clear()
    parts.clear()
    gc.collect()
    assert [ref() is None for ref in seen] == [True, True, False]


def test_no_sum_in_order_that_was_aborted_passes_for_whole():
    stage, _, _, _, _ = stage_and_sum()
    stage.all_reduce(torch.ones(2)).join(never)
    stage.abort()
    with pytest.raises(Interrupted):
        stage.all_reduce(torch.ones(2)).join(never)
    with pytest.raises(Interrupted):
        stage.conclude_in_order()


def test_what_depends_on_a_stages_sums_is_summed_with_others_once_they_are_whole():
    stage, owners, streams, (_, mate), (mine, other) = stage_and_sum()
    flats = [torch.ones(2), torch.ones(2)]
    num_posted = len(mine.works)
    stage.all_reduce(flats[0]).join(never)
    reductions = [owners.all_reduce(flat, stage=stage) for flat in flats]
    assert len(streams.marks) == len(reductions)
    streams.marks[1].has_come.set()
    time.sleep(0.05)
    assert len(mine.works) == num_posted, "in their order, and not before they are computed"
    assert owners.has_open_sums, "a fence must find them"
    mate.allreduce([torch.ones(2)], None)
    streams.marks[0].has_come.set()
    until(lambda: len(mine.works) == num_posted + 2)
    for _ in flats:
        other.allreduce([torch.full((2,), 5.0)], None)
    for reduction in reductions:
        reduction.wait(never)
    assert [flat.tolist() for flat in flats] == [[7.0] * 2, [6.0] * 2]
    assert not owners.has_open_sums


@pytest.mark.parametrize("aborted", ["stage", "reduce"])
def test_nothing_that_an_abort_may_have_harmed_is_summed_with_others(aborted: str):
    stage, owners, streams, _, (mine, _) = stage_and_sum()
    flat, num_posted = torch.ones(2), len(mine.works)
    stage.all_reduce(flat).join(never)
    reduction, whole = owners.all_reduce(flat, stage=stage), stage.when_whole()
    assert whole is not None
    (stage if aborted == "stage" else owners).abort()
    for mark in streams.marks:
        mark.has_come.set()
    with pytest.raises(Interrupted):
        reduction.wait(never)
    assert len(mine.works) == num_posted
    if aborted == "stage":
        with pytest.raises(Interrupted):
            whole.wait(never)
    else:
        whole.wait(never)
        assert not stage.is_harmed, "the stage's own sums are none of theirs"


def test_a_section_is_whole_only_with_its_stages_sums():
    """Its gradients may be those of this stage alone, so that no sum with others tells."""
    stage, _, streams, _, _ = stage_and_sum()
    alone = GroupKey("reduce", 1, (A,))
    parameters = {"p": torch.nn.Parameter(torch.ones(2))}
    reducer = GradientReducer([Bucket(key=alone, parameters=("p",))], parameters, {}, stage=stage)  # type: ignore[arg-type]
    reducer.begin({"p": torch.ones(2)})
    assert not reducer.is_done()
    streams.marks[0].has_come.set()
    until(reducer.is_done)
    assert reducer.finish(never)["p"].tolist() == [1.0, 1.0]
    reducer.begin({"p": torch.ones(2)})
    reducer.abandon()
    assert not stage.is_harmed, "a section is given back, and its pipeline goes on"
    reducer.begin({"p": torch.ones(2)})
    stage.abort()
    for mark in streams.marks:
        mark.has_come.set()
    with pytest.raises(Interrupted):
        reducer.finish(never)


# --- the GIL -------------------------------------------------------------------------------------------------------


def in_both_groups(num_groups: int) -> tuple[list[Group], list[FakeNccl]]:
    """Groups of two members that are connected, seen from one of them."""
    found = [connected() for _ in range(num_groups)]
    return [groups[0] for groups, _ in found], [fakes[0] for _, fakes in found]


def test_aborts_that_wait_for_each_other_end_while_their_sums_are_polled():
    """A poll that waits for one of them keeps the GIL, without which the other never begins."""
    for _ in range(10):
        groups, fakes = in_both_groups(2)
        begun = threading.Barrier(2)
        for fake in fakes:
            fake.on_abort = lambda begun=begun: begun.wait(20)
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(group.all_reduce(torch.ones(2)).wait, never) for group in groups]
            time.sleep(2e-3)
            groups[0].abort()
            groups[1].abort()
            for wait in waits:
                with pytest.raises(Interrupted):
                    wait.result(20)
        until(lambda fakes=fakes: all(fake.is_aborted for fake in fakes))


def test_threads_run_while_an_abort_takes_long():
    (group,), (fake,) = in_both_groups(1)
    fake.on_abort = lambda: time.sleep(0.1)
    reduction, polls = group.all_reduce(torch.ones(2)), 0
    group.abort()
    while not fake.is_aborted:
        assert reduction.is_done(), "what is aborted is over, for whoever waits for it"
        polls += 1
        time.sleep(1e-3)
    assert polls > 1
    with pytest.raises(Interrupted):
        reduction.wait(never)


def test_all_communicators_of_a_fence_are_given_up_before_the_first_is_aborted():
    tables = [LinkedTable(worker_id) for worker_id in (A, B)]
    acquaint(tables)
    keys = [GroupKey("reduce", generation, (A, B)) for generation in (1, 2)]
    fakes = {key: FakeNccl.join(2) for key in keys}

    def form(rank: int) -> None:
        tables[rank].groups.form(keys, never, generation=1)
        for key in keys:
            tables[rank].groups[key].use_nccl(nccl_of(tables[rank].groups[key], fakes[key][rank]), 10.0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(form, range(2)))
    groups = tables[0].groups
    open_sums = [groups[key].all_reduce(torch.ones(2)) for key in keys]
    seen: list[bool] = []
    for key in keys:
        fakes[key][0].on_abort = lambda: seen.extend(each.is_done() for each in open_sums)
    groups.abort_fenced(is_pipeline_stopped=False)
    until(lambda: all(fakes[key][0].is_aborted for key in keys))
    assert seen == [True] * 4


@pytest.mark.usefixtures("own_nccl")
def test_a_bucket_is_posted_at_once_after_an_error_of_nccls_own():
    """A hook of the last backward pass posts it, and nothing could end its wait for torch's watchdog."""
    (group,), (fake,) = in_both_groups(1)
    prepare_nccl("127.0.0.1")
    group.all_reduce(torch.ones(2))
    fake.fail(RuntimeError("NCCL error: remote process exited or there was a network error"))
    began_s = time.monotonic()
    group.all_reduce(torch.ones(2))
    assert time.monotonic() - began_s < 1.0


# --- B5 ------------------------------------------------------------------------------------------------------------


def test_a_group_that_was_given_up_while_it_was_formed_is_aborted_once_it_can_be():
    """The other member comes late; until then torch does not know the communicator that `abort` should end."""
    one, (mine, theirs) = group_of(A), FakeNccl.join(2)
    with ThreadPoolExecutor(2) as pool:
        forming = pool.submit(one.use_nccl, nccl_of(one, mine), 10.0)
        until(lambda: 0 in mine.world.come)
        one.abort()
        until(lambda: mine.num_aborts == 1)
        assert not mine.is_aborted
        late = pool.submit(theirs.allreduce, [torch.zeros(1)], None)
        with pytest.raises(Interrupted):
            forming.result(20)
        late.result(20)
    until(lambda: mine.is_aborted)
    assert mine.device_synchronize(20.0)
    with pytest.raises(Interrupted):
        one.all_reduce(torch.ones(1))


def test_a_group_that_is_given_up_before_it_has_nccl_never_uses_it():
    one, (mine, _) = group_of(A), FakeNccl.join(2)
    one.abort()
    with pytest.raises(Interrupted):
        one.use_nccl(nccl_of(one, mine), 10.0)
    until(lambda: mine.num_aborts)
    assert mine.works == []
