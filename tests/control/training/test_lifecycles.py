"""Who takes part, decided by each part alone: what it notes and commands, and what it tells the program."""

from __future__ import annotations

from typing import ClassVar

import pytest

from oobleck.control.events import Connect, Disconnect, NodeUp, Record, Send, StopRequested, Turn
from oobleck.control.journal import ConnectionLost, Loss, LossCause, Misfit, NodeLost, WorkerDown, WorkerEnded
from oobleck.control.nodes import Member, Membership, MemberState, NodeLifecycle, Program, WorkerLifecycle
from oobleck.control.nodes.node_retry import NodeRetry
from oobleck.control.protocol import ErrorKind, Killed, Raised, StartWorker, WorkerEnd, WorkerExited
from oobleck.planner import WorkerId
from tests.control.bench import hello, ready
from tests.control.model import Shape

LOST = ConnectionLost()


class Noted(Program):
    """A program that notes what it is told, and does nothing about it."""

    work: ClassVar[str] = "training"
    is_begun = True
    generation = 1
    furthest_step = 0

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def is_at_work(self, member: Member) -> bool:
        return member.is_ready

    def needs(self, node: str) -> bool:
        return False

    def configure(self, turn: Turn, node: str) -> None:
        self.told.append(("configure", node))

    def node_back(self, turn: Turn, event: NodeUp) -> None:
        self.told.append(("back", event.node))

    def node_met(self, turn: Turn, node: str, *, is_again: bool) -> None:
        self.told.append(("met", node, is_again))

    def drop_node(self, turn: Turn, node: str, loss: Loss) -> None:
        self.told.append(("drop", node, loss))

    def go_on_without(self, turn: Turn, member: Member, loss: LossCause, silent_s: float) -> None:
        self.told.append(("go on without", member.spec.name, member.is_ready, loss, silent_s))

    def node_draining(self, turn: Turn, node: str) -> None:
        self.told.append(("draining", node))

    def node_left(self, turn: Turn, node: str) -> None:
        self.told.append(("left", node))

    def stop(self, turn: Turn, event: StopRequested) -> None:
        self.told.append(("stop", event.exit_code))

    def worker_ended(self, turn: Turn, worker_id: WorkerId, end: WorkerEnd) -> None:
        if isinstance(end, Raised):
            self.told.append(("raised", worker_id, end))

    def is_met_elsewhere(self, worker_id: WorkerId) -> bool:
        return False

    def drop_worker(self, turn: Turn, worker_id: WorkerId) -> None:
        self.told.append(("drop worker", worker_id))


class Nodes:
    """Three nodes that train, heard of at second 10."""

    def __init__(self) -> None:
        self.program = Noted()
        self.members = Membership.of(Shape(num_nodes=3).nodes)
        self.lifecycle = NodeLifecycle(
            self.members, NodeRetry(first_wait_s=5.0), self.program, python_version="3.11.2", most_kinds=1
        )
        self.workers = WorkerLifecycle(self.members, self.lifecycle, self.program)
        for member in self.members.all:
            self.members.meet(member.spec.name, hello(member.spec.name), address="10.0.0.1", now_s=10.0)
            self.note_ready(member.spec.name)

    def note_ready(self, node: str, **fields: int) -> None:
        worker = self.workers.worker_up(self.members[node], ready(**fields), 10.0)
        assert worker is not None
        self.members.note_ready(worker, generation=0)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_a_lost_node_is_dropped_and_gone_on_without(nodes: Nodes):
    turn = Turn(12.0)
    nodes.lifecycle.give_up(turn, "n1", LOST)
    assert turn.commands == [
        Disconnect(node="n1"),
        Record(entry=NodeLost(t_s=12.0, node="n1", loss=LOST, is_requested=False, is_tried_again=True)),
    ]
    assert nodes.program.told == [
        ("drop", "n1", LOST),
        ("go on without", "n1", True, LossCause.CONNECTION_LOST, 2.0),
    ]


def test_a_lost_node_is_lost_once_and_tried_again(nodes: Nodes):
    nodes.lifecycle.give_up(Turn(12.0), "n1", LOST)
    nodes.program.told.clear()
    again = Turn(13.0)
    nodes.lifecycle.give_up(again, "n1", LOST)
    assert (again.commands, nodes.program.told) == ([], [])
    assert nodes.lifecycle.retries_s == 17.0
    later = Turn(17.0)
    nodes.lifecycle.retry_lost(later)
    assert later.commands == [Connect(node=nodes.members["n1"].spec)]


def test_the_program_is_told_that_a_lost_node_did_not_train(nodes: Nodes):
    nodes.members.note_restart(WorkerId(node="n1", device=0), 7, now_s=11.0, step=0)
    nodes.lifecycle.give_up(Turn(12.0), "n1", LOST)
    assert nodes.program.told[-1][:3] == ("go on without", "n1", False)


def test_a_node_that_fails_before_training_is_dropped_and_nothing_else(nodes: Nodes):
    nodes.program.is_begun = False
    nodes.lifecycle.give_up(Turn(12.0), "n1", LOST)
    assert nodes.program.told == [("drop", "n1", LOST)]


def test_a_node_is_drained_once(nodes: Nodes):
    for now_s in (12.0, 13.0):
        nodes.lifecycle.drain(Turn(now_s), "n1")
    assert nodes.members["n1"].is_draining
    assert nodes.program.told == [("draining", "n1")]


def test_an_agent_that_does_not_fit_is_given_up(nodes: Nodes):
    turn = Turn(12.0)
    nodes.lifecycle.node_up(turn, NodeUp(node="n1", hello=hello("n1", python_version="3.9.1"), address="10.0.0.1"))
    (entry,) = [command.entry for command in turn.commands if isinstance(command, Record)]
    assert isinstance(entry, NodeLost)
    assert isinstance(entry.loss, Misfit)
    assert nodes.members["n1"].state is MemberState.LOST


def test_a_worker_that_ends_is_started_again_and_its_node_given_up_when_it_ends_too_often(nodes: Nodes):
    worker_id = WorkerId(node="n1", device=0)
    for pid in range(8, 11):
        turn = Turn(12.0)
        exited = WorkerExited(device=0, pid=pid, end=Killed(signal=9))
        nodes.workers.worker_exited(turn, nodes.members["n1"], exited)
        assert turn.commands == [
            Record(entry=WorkerDown(t_s=12.0, node="n1", device=0, pid=pid, end=Killed(signal=9), also=())),
            Send(node="n1", message=StartWorker(device=0)),
        ]
        assert nodes.program.told == [
            ("drop worker", worker_id),
            ("go on without", "n1", True, LossCause.WORKER_EXITED, 2.0),
        ]
        nodes.program.told.clear()
        nodes.note_ready("n1", pid=pid + 1)
    error = Raised(kind=ErrorKind.CODE, message="broken")
    nodes.workers.worker_exited(Turn(12.0), nodes.members["n1"], WorkerExited(device=0, pid=11, end=error))
    loss = WorkerEnded(pid=11, end=error)
    assert nodes.program.told[:2] == [("raised", worker_id, error), ("drop", "n1", loss)]
    assert nodes.members["n1"].last_words
