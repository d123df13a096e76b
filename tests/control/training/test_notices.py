"""Nodes that say that they are about to be taken away: one is drained, and the loss of all of them is an end."""

from __future__ import annotations

from dataclasses import replace

from oobleck.control.events import AddRequested
from oobleck.control.journal import LossCause, NodeLost
from oobleck.control.protocol import Leaving
from oobleck.errors import ExitCode
from oobleck.job import NodeSpec
from tests.control.bench import Bench
from tests.control.model import Shape

SINGLES = Shape(num_nodes=3, layers_per_device=4, num_layers=4, max_steps=3)
NODES = ("n0", "n1", "n2")


def training(shape: Shape = SINGLES) -> Bench:
    bench = Bench(shape)
    bench.prepare()
    bench.commit("n0", 1)
    return bench


def give_notice(bench: Bench, *nodes: str) -> None:
    for node in nodes:
        bench.say(node, Leaving(reason="SIGTERM"))


def test_nodes_that_end_after_their_notice_are_an_end_that_can_be_resumed():
    bench = training()
    give_notice(bench, *NODES)
    for node in NODES:
        bench.fail(node)
    assert bench.ended is not None
    assert (bench.ended.exit_code, bench.ended.reason) == (ExitCode.RESUMABLE, "all nodes were taken away")


def test_nodes_that_fall_silent_after_their_notice_are_not_waited_for():
    """Without one, the silence of most has the master suspect itself for two minutes."""
    bench = training()
    give_notice(bench, *NODES)
    bench.beat_until(bench.now_s + 1.0, *NODES)
    for _ in range(20):
        bench.wait(0.5)
    assert {entry.node: entry.loss.cause for entry in bench.journal(NodeLost)} == dict.fromkeys(
        NODES, LossCause.LEASE_EXPIRED
    )
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.RESUMABLE


def test_the_silence_of_most_is_judged_by_those_that_stay():
    """Two of four have had notice: their silence says nothing of this master, and that of the others does."""
    bench = training(replace(SINGLES, num_nodes=4))
    give_notice(bench, "n0")
    bench.beat_until(bench.now_s + 4.0, "n1", "n2", "n3")
    assert [entry.node for entry in bench.journal(NodeLost)] == ["n0"]
    bench.beat_until(bench.now_s + 4.0, "n3")
    assert [entry.node for entry in bench.journal(NodeLost)] == ["n0"], "most of those that stay are silent"


def test_nodes_that_are_lost_without_notice_are_a_failure():
    bench = training()
    give_notice(bench, "n0", "n1")
    for node in NODES:
        bench.fail(node)
    assert bench.ended is not None
    assert (bench.ended.exit_code, bench.ended.reason) == (ExitCode.FAILED, "all nodes are lost")


# --- nodes on their way ----------------------------------------------------------------------------------------------


def test_a_run_without_nodes_waits_for_one_that_is_being_reached():
    bench = training()
    late = NodeSpec(name="late", host="late")
    bench.feed(AddRequested(spec=late))
    for node in NODES:
        bench.fail(node)
    assert bench.ended is None
    limit_s = bench.job.control.start_timeout_s
    bench.up("late")
    assert bench.ended is None
    bench.beat_until(bench.now_s + limit_s - 1.0, "late")
    assert bench.ended is None
    bench.beat_until(bench.now_s + 2.0, "late")
    assert bench.ended is not None
    assert "late" in bench.ended.reason


def test_a_node_that_cannot_be_reached_is_waited_for_no_longer():
    bench = training()
    bench.feed(AddRequested(spec=NodeSpec(name="late", host="late")))
    for node in (*NODES, "late"):
        bench.fail(node)
    assert bench.ended is not None
    assert bench.ended.reason == "all nodes are lost"
