"""Entries as sentences, and nodes that come and go as the view of a run shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.journal import (
    NodeAdded,
    NodeConnected,
    NodeLeft,
    PlanCause,
    RecoveryStarted,
    WorkerDown,
    WorkerUp,
)
from oobleck.control.journal.snapshot import NodeState
from oobleck.control.journal.view import RunView
from oobleck.control.protocol import ErrorKind, Exited, Killed, Raised, end_text
from oobleck.job import NodeSpec
from tests.control.journals import job_started, recovered

SPEC = NodeSpec(name="n9", host="n9")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (NodeAdded(t_s=1.0, node=SPEC), "n9 is added"),
        (NodeAdded(t_s=1.0, node=replace(SPEC, origin="Slurm's job 17")), "n9 is added (Slurm's job 17)"),
        (NodeLeft(t_s=1.0, node="n9"), "n9 has left"),
        (
            WorkerDown(t_s=1.0, node="n9", device=0, pid=8, end=Killed(signal=9)),
            "the worker of n9 ended (killed by signal 9); it is started again",
        ),
        (
            WorkerDown(t_s=1.0, node="n9", device=0, pid=8, end=Exited(exit_code=1), also=(1,)),
            "a worker of n9 ended (exit code 1); the node's workers are started again",
        ),
        (RecoveryStarted(t_s=1.0, generation=2, nodes=("n9",), cause=PlanCause.JOINED), "taking in n9"),
        (RecoveryStarted(t_s=1.0, generation=2, nodes=("n9",), cause=PlanCause.DRAINED), "draining n9"),
        (RecoveryStarted(t_s=1.0, generation=2, nodes=("n9",), cause=PlanCause.HANG), "recovering from the loss of n9"),
        (RecoveryStarted(t_s=1.0, generation=2, nodes=(), cause=PlanCause.HANG), "regrouping; no node is lost"),
        (
            recovered(1.0, 2, "n9", cause=PlanCause.JOINED),
            "n9 taken in; new pipelines; 2 layers copied in 0.21 s; no step lost",
        ),
        (recovered(1.0, 2, steps_lost=1), "regrouped; new pipelines; 2 layers copied in 0.21 s; 1 step lost"),
        (
            replace(recovered(1.0, 2, "n9"), layers_moved=0),
            "n9 lost; new pipelines; nothing copied; no step lost",
        ),
    ],
)
def test_entries_are_sentences(entry, text: str):
    assert entry.sentence == text


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Killed(signal=9), "killed by signal 9"),
        (Exited(exit_code=3), "exit code 3"),
        (Raised(kind=ErrorKind.CODE, message="ValueError: bad", traceback="a long text"), "ValueError: bad"),
    ],
)
def test_why_a_worker_ended(end, text: str):
    assert end_text(end) == text


def test_the_view_follows_nodes_that_come_and_go():
    view = RunView()
    entries = [
        (NodeAdded(t_s=1.0, node=SPEC), NodeState.CONNECTING),
        (NodeConnected(t_s=2.0, node="n9", agent_pid=1), NodeState.CONNECTED),
        (WorkerUp(t_s=3.0, node="n9", device=0, pid=2, data_digest="d"), NodeState.READY),
        (WorkerDown(t_s=4.0, node="n9", device=0, pid=8, end=Exited(exit_code=1)), NodeState.CONNECTED),
        (NodeLeft(t_s=5.0, node="n9"), NodeState.ENDED),
    ]
    view.apply(job_started(("n0",)))
    for entry, state in entries:
        view.apply(entry)
        (node,) = [node for node in view.at(6.0).nodes if node.name == "n9"]
        assert node.state is state
