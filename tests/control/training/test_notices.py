"""Nodes that say that they are about to be taken away: one is drained; when all are, the run saves and ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.events import AddRequested
from oobleck.control.journal import LossCause, NodeAdded, NodeLost
from oobleck.control.protocol import AgentStopped, Finished, FinishStep, Leaving
from oobleck.errors import ExitCode
from oobleck.job import NodeSpec
from tests.control.bench import Bench
from tests.control.model import Shape
from tests.control.training.test_coordinator import answer_all

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


def asked_to_finish(bench: Bench) -> set[str]:
    asked = {node: bench.messages(bench.commands, node) for node in NODES}
    return {node for node, messages in asked.items() if any(isinstance(each, FinishStep) for each in messages)}


def test_a_run_whose_nodes_all_have_notice_finishes_its_step_and_can_be_resumed():
    bench = training()
    give_notice(bench, "n0", "n1")
    assert not asked_to_finish(bench)
    give_notice(bench, "n2")
    assert asked_to_finish(bench) == set(NODES), "each stays, for there is nobody to take over from it"
    answer_all(bench, *NODES)
    for node in NODES:
        bench.say(node, Finished(device=0, applied=1))
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.RESUMABLE
    assert bench.ended.reason.startswith("all nodes are to be taken away; the same command continues from here")


@pytest.mark.parametrize("has_left", [False, True])
def test_nodes_that_are_gone_do_not_keep_the_others_from_an_end(*, has_left: bool):
    bench = training()
    if has_left:
        give_notice(bench, "n2")
        answer_all(bench, "n0", "n1", "n2")
        bench.say("n2", AgentStopped(reason="drained", is_failure=False))
    else:
        bench.fail("n2")
    give_notice(bench, "n0")
    assert not asked_to_finish(bench)
    give_notice(bench, "n1")
    assert asked_to_finish(bench) or bench.ended is not None


def test_a_node_on_its_way_keeps_a_run_from_its_end():
    bench = training()
    bench.feed(AddRequested(spec=NodeSpec(name="late", host="late")))
    give_notice(bench, *NODES)
    assert not asked_to_finish(bench)
    bench.fail("late")
    assert asked_to_finish(bench) == set(NODES)


def test_a_start_whose_nodes_all_have_notice_ends_at_once():
    bench = Bench(SINGLES)
    for node in NODES:
        bench.up(node)
    give_notice(bench, *NODES)
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.RESUMABLE


def test_a_node_that_is_back_before_its_loss_is_known_joins_when_it_is():
    bench = training()
    back = AddRequested(spec=bench.nodes[1], by_itself=True, has_arrived=True)
    bench.feed(back)
    assert not bench.journal(NodeAdded)
    bench.fail("n1")
    assert [entry.node for entry in bench.journal(NodeAdded)] == [bench.nodes[1]]
    bench.up("n1")
    bench.fail("n1")
    assert len(bench.journal(NodeAdded)) == 1, "once for each time that it arrives"


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
