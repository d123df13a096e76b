"""Who takes part, decided by each part alone: values in, effects out."""

from __future__ import annotations

import pytest

from oobleck.control.events import Connect, Disconnect, NodeUp, Record
from oobleck.control.journal import ConnectionLost, LossCause, Misfit, NodeLost, PlanCause, WorkerEnded
from oobleck.control.nodes import Membership, NodeRetry
from oobleck.control.protocol import ErrorKind, Killed, Raised, WorkerExited
from oobleck.control.recovery.states import BeginRecovery, GiveUp, NodeGone
from oobleck.control.steps import Progress
from oobleck.control.training.node_lifecycle import NodeLifecycle
from oobleck.control.training.requests import (
    NodeDropped,
    PlanWithout,
    StartAgain,
    WorkerDropped,
    WorkerRaised,
    WorkerRestarted,
    WorkersFail,
)
from oobleck.control.training.worker_lifecycle import WorkerLifecycle
from oobleck.planner import WorkerId
from tests.control.bench import hello, ready
from tests.control.model import Shape

LOST = ConnectionLost()


@pytest.fixture
def members() -> Membership:
    """Three nodes that train, heard of at second 10."""
    members = Membership(Shape(num_nodes=3).nodes)
    workers = WorkerLifecycle(members, Progress(Shape().job))
    for member in members.all:
        members.meet(member.spec.name, hello(member.spec.name), address="10.0.0.1", now_s=10.0)
        worker = workers.worker_up(member, ready(), 10.0)
        assert worker is not None
        members.note_ready(worker, generation=0)
    return members


def lifecycle(members: Membership) -> NodeLifecycle:
    return NodeLifecycle(members, NodeRetry(first_wait_s=5.0), most_kinds=1)


def test_a_lost_node_is_dropped_and_planned_without(members: Membership):
    nodes = lifecycle(members)
    assert nodes.give_up("n1", LOST, 12.0, is_begun=True) == (
        Disconnect(node="n1"),
        Record(entry=NodeLost(t_s=12.0, node="n1", loss=LOST, is_requested=False, is_tried_again=True)),
        NodeDropped(node="n1", loss=LOST),
        PlanWithout(node="n1", loss=LossCause.CONNECTION_LOST, detect_s=2.0),
    )
    assert nodes.give_up("n1", LOST, 13.0, is_begun=True) == ()
    assert nodes.retries_s == 17.0
    assert nodes.retry_lost(17.0) == (Connect(node=members["n1"].spec),)


def test_a_node_that_never_trained_is_not_planned_without(members: Membership):
    members.note_restart(WorkerId(node="n1", device=0), 7, now_s=11.0, step=0)
    assert lifecycle(members).give_up("n1", LOST, 12.0, is_begun=True)[-1] == NodeGone()


def test_a_node_that_fails_before_training_is_dropped_and_nothing_else(members: Membership):
    effects = lifecycle(members).give_up("n1", LOST, 12.0, is_begun=False)
    assert effects[-1] == NodeDropped(node="n1", loss=LOST)


def test_a_drain_begins_a_recovery_once(members: Membership):
    nodes = lifecycle(members)
    assert nodes.drain("n1", 12.0, is_begun=True) == (BeginRecovery(cause=PlanCause.DRAINED, nodes=("n1",)),)
    assert nodes.drain("n1", 12.0, is_begun=True) == ()


def test_an_agent_that_does_not_fit_is_given_up(members: Membership):
    event = NodeUp(node="n1", hello=hello("n1"), address="10.0.0.1")
    (effect,) = lifecycle(members).node_up(event, 12.0, misfit="another version", generation=1)
    assert effect == GiveUp(nodes=("n1",), loss=Misfit(problem="another version"))


def test_a_worker_that_ends_is_started_again_and_given_up_when_it_ends_too_often(members: Membership):
    workers = WorkerLifecycle(members, Progress(Shape().job))
    worker_id = WorkerId(node="n1", device=0)
    for pid in range(8, 11):
        exited = WorkerExited(device=0, pid=pid, end=Killed(signal=9))
        restarted, *effects = workers.worker_exited(members["n1"], exited, 12.0, is_begun=True)
        assert restarted == WorkerRestarted(worker_id=worker_id, pid=pid, also=())
        assert [type(effect) for effect in effects] == [Record, StartAgain, WorkerDropped, PlanWithout]
        assert members["n1"].is_ready, "what is known of it is for the coordinator to change"
        members.note_restart(worker_id, pid, now_s=12.0, step=0)
        worker = workers.worker_up(members["n1"], ready(pid=pid + 1), 12.0)
        assert worker is not None
        members.note_ready(worker, generation=0)
    error = Raised(kind=ErrorKind.CODE, message="broken")
    exited = WorkerExited(device=0, pid=11, end=error)
    raised, said, given_up = workers.worker_exited(members["n1"], exited, 12.0, is_begun=True)
    assert isinstance(raised, WorkerRaised)
    assert isinstance(said, WorkersFail)
    assert given_up == GiveUp(nodes=("n1",), loss=WorkerEnded(pid=11, end=error))
