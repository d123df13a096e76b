"""What a worker answers at a fence, and when."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from oobleck.control.protocol import Fence, Status, WorkerMessage
from oobleck.training.process.standing import Standing
from oobleck.training.worker_log import WorkerLog
from tests.training.comm.fake_nccl import FakeNccl
from tests.training.comm.test_nccl import KEY, A, B, nccl_of, never, until
from tests.training.step.test_step import OneWorker
from tests.training.table import LinkedTable, acquaint


def test_a_fence_is_answered_before_anything_is_aborted():
    """An abort may take long or stop all threads, and the node of a worker that does not answer is given up."""
    tables, fakes = [LinkedTable(worker_id) for worker_id in (A, B)], FakeNccl.join(2)
    acquaint(tables)

    def form(rank: int) -> None:
        tables[rank].groups.form([KEY], never, generation=1)
        tables[rank].groups[KEY].use_nccl(nccl_of(tables[rank].groups[KEY], fakes[rank]), 10.0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(form, range(2)))
    under_way = tables[0].groups[KEY].all_reduce(torch.ones(2))
    answers: list[tuple[WorkerMessage, bool]] = []
    worker = OneWorker(None)
    standing = Standing(
        A,
        worker.commit_state,
        tables[0].waiter,
        tables[0].groups,
        tables[0].links,
        training_thread=threading.get_ident(),
        log=WorkerLog(__name__, A),
        send=lambda message: answers.append((message, under_way.is_done())),
    )
    standing.answer(Fence(device=0, generation=2, lost=("b",)))
    ((answer, was_aborted),) = answers
    assert isinstance(answer, Status)
    assert answer.applied == 0
    assert not was_aborted
    assert under_way.is_done(), "it is aborted at once after the answer"
    until(lambda: fakes[0].is_aborted)
    for table in tables:
        table.groups.keep_only([], generation=99)
        table.links.close()


def test_who_is_asked_why_no_step_is_committed_says_whether_it_went_on_once_nothing_held_it():
    table, worker = LinkedTable(A), OneWorker(None)
    answers: list[WorkerMessage] = []
    standing = Standing(
        A,
        worker.commit_state,
        worker.waiter,
        table.groups,
        table.links,
        training_thread=threading.get_ident(),
        log=WorkerLog(__name__, A),
        send=answers.append,
    )
    fence = Fence(device=0, generation=2, lost=(), probe_addresses=(table.links.address,), patience_s=20.0)
    standing.answer(fence)
    worker.waiter.wait(lambda: True, never)  # it comes on
    until(lambda: answers)
    (answer,) = answers
    assert isinstance(answer, Status)
    assert answer.has_come_on
    assert "test_who_is_asked" in answer.stack
    table.links.close()
