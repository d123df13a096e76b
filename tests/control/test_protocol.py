"""Each message says itself whose it is."""

from __future__ import annotations

from typing import get_args

import pytest

from oobleck.control.journal import WorkerUp
from oobleck.control.nodes import Membership, check_device, is_of_training, is_of_worker_that_ends
from oobleck.control.protocol import (
    AgentMessage,
    CheckpointsFound,
    ForWorker,
    FromWorker,
    MasterMessage,
    PeerFailed,
    SetUpWorker,
    UseShare,
    WorkerBound,
    WorkerCommand,
    WorkerFailed,
    WorkerMessage,
    WorkerReport,
)
from oobleck.errors import PeerError
from oobleck.job import NodeSpec
from oobleck.planner import WorkerId


def subclasses(base: type) -> set[type]:
    """Without those that `slots=True` has replaced."""
    return {cls for cls in base.__subclasses__() if "__slots__" in vars(cls)}


def test_whatever_a_worker_says_has_its_device():
    assert all(issubclass(cls, FromWorker) for cls in get_args(WorkerReport))
    assert set(get_args(WorkerMessage)) - set(get_args(WorkerReport)) == {WorkerFailed}


def test_every_message_of_a_worker_reaches_the_master():
    assert subclasses(FromWorker) <= set(get_args(AgentMessage))
    assert set(get_args(WorkerReport)) <= set(get_args(AgentMessage))


def test_every_message_for_a_worker_is_relayed_to_it():
    assert subclasses(ForWorker) == set(get_args(WorkerCommand))
    assert set(get_args(WorkerCommand)) <= set(get_args(MasterMessage))
    assert set(get_args(WorkerBound)) - set(get_args(WorkerCommand)) == {SetUpWorker, UseShare}


@pytest.fixture
def members() -> Membership:
    return Membership.of((NodeSpec(name="n0", host="n0", devices=(0, 1)),))


def test_a_node_speaks_for_its_own_devices(members: Membership):
    check_device(members["n0"], PeerFailed(device=1, generation=1, detail=""))
    with pytest.raises(PeerError, match=r"device 2\b.* 2$"):
        check_device(members["n0"], PeerFailed(device=2, generation=1, detail=""))


def test_words_of_a_worker_that_ends_are_dropped_unless_they_outlive_it(members: Membership):
    members.note_connected("n0", agent_pid=9)
    for device in (0, 1):
        members.note_ready(WorkerUp(t_s=0.0, node="n0", device=device, pid=device, data_digest="d"), generation=0)
    before = members["n0"]
    members.note_restart(WorkerId(node="n0", device=0), 0, now_s=1.0, step=0, also=(1,))
    ending = members["n0"]
    failed = PeerFailed(device=1, generation=1, detail="")
    found = CheckpointsFound(device=1, request=1, found=(), problems=(), unfinished=())
    assert (is_of_worker_that_ends(ending, failed), is_of_worker_that_ends(before, failed)) == (True, False)
    assert not is_of_worker_that_ends(ending, found)


def test_before_the_first_plan_a_worker_can_answer_and_not_train():
    assert is_of_training(PeerFailed(device=0, generation=1, detail=""))
    assert not is_of_training(CheckpointsFound(device=0, request=1, found=(), problems=(), unfinished=()))
