"""Nodes and workers come and go in many ways; what training computes stays the same. More are in test_commands.py.

Each run goes on until everything has happened to it that should, and is stopped then, so that no test depends on how
many steps this machine makes in a second.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .elastic import (
    ENDLESS,
    PACED,
    SHORT_LEASE,
    Elastic,
    Reference,
    assert_all_is_right,
    assert_cost_its_lease,
    assert_losses,
    freeze,
    nodes_of,
    recoveries,
)
from .harness import TAG, Runner, started_at, worker_pids


def assert_crash_is_told(runner: Runner) -> None:
    logs = "".join(log.read_text() for log in (runner.base_dir / TAG).glob("agent*.log"))
    assert "Fatal Python error: Segmentation fault" in logs, "from the log of the agent that started the fork server"
    assert 'oobleck/training/step/engine.py", line' in logs, "where each thread was"


@pytest.mark.slow
def test_workers_and_agents_end_by_themselves_and_are_back_and_one_is_given_notice(
    start: Callable[..., Any], runner: Runner
) -> None:
    """One run: a worker crashes, and is started again in place while all others keep their processes.

    An agent is killed while its worker lives: its worker ends too, and the node comes back by itself. Once it is given
    notice, it gives its state away, and leaves.
    """
    with start("--set", "control.rejoin_after_s=1") as run:
        before = worker_pids(runner)
        os.kill(before["node1"], signal.SIGSEGV)
        run.up.wait_for("the worker of node1 ended (killed by signal 11")
        run.up.wait_for("node1 taken in; worker restarted")
        run.up.wait_for_steps(3)
        after = worker_pids(runner)
        orphan = after["node2"]
        birth = started_at(orphan)
        assert after.pop("node1") != before.pop("node1")
        assert after == before, "all others keep their processes"
        assert all(started_at(pid) for pid in after.values())
        assert "NodeLost" not in {entry["@type"] for entry in runner.journal()}

        (agent,) = runner.pids("node2", "agent")
        os.kill(agent, signal.SIGKILL)
        run.up.wait_for("node2 lost: its connection was lost")
        run.up.wait_for("node2 taken in; pipelines grow")
        assert started_at(orphan) != birth, "a worker without its agent ends"
        run.up.wait_for_steps(3)

        (agent,) = runner.pids("node2", "agent")
        os.kill(agent, signal.SIGTERM)
        run.up.wait_for("node2 is to be terminated: its agent was sent SIGTERM")
        run.up.wait_for("node2 has left")
        run.up.wait_for_steps(3)
        outcome = run.stop()
    assert [(cause, *nodes) for cause, _, nodes in recoveries(outcome)] == [
        ("worker_exited", "node1"),
        ("joined", "node1"),
        ("connection_lost", "node2"),
        ("joined", "node2"),
        ("drained", "node2"),
    ]
    assert nodes_of(outcome) == ["node0", "node1", "node3"]
    assert_crash_is_told(runner)


def test_the_only_holder_of_a_layer_hands_it_over_before_it_leaves_and_past_the_last_copy_the_run_ends(
    runner: Runner, endless_reference: Reference
) -> None:
    """The end names the layers that nobody holds any more."""
    settings = ("--pipelines", "1", "-f", "0", "--steps", str(ENDLESS))
    with runner.up("--job", str(runner.job_file()), *settings, nodes=("--local", "3", PACED)) as up:
        up.wait_for_step(5)
        run = Elastic(runner, up)
        run.command("drain", "node2")
        up.wait_for("node2 has left")
        up.wait_for_steps(3)
        run.command("kill", "node1")
        outcome = up.finish()
    assert outcome.exit_code == 1, outcome.output
    handed_over = outcome.recoveries[0]
    assert (handed_over["cause"], handed_over["nodes"]) == ("drained", ["node2"])
    assert handed_over["bytes_moved"] > 0
    assert_losses(outcome.losses, endless_reference)
    assert "node1" in outcome.summary["reason"]
    assert "layer" in outcome.summary["reason"]
    assert runner.left_over() == []


@pytest.mark.slow  # test_master.py has the takeover
def test_a_run_after_a_killed_master_has_no_part_of_the_one_before(
    runner: Runner, endless_reference: Reference
) -> None:
    """Agents outlive their master for a while; a run that starts anew must neither meet them nor their workers."""
    given = ("--job", str(runner.job_file()), "--steps", str(ENDLESS))
    with runner.up(*given) as up:
        up.wait_for_step(5)
        before = {pid: started_at(pid) for pid in worker_pids(runner).values()}
        up.process.kill()
        up.process.wait()
    with runner.up(*given, "--resume", "never") as up:
        assert "step 1/" in up.wait_for("] step ")
        assert all(started_at(pid) != ticks for pid, ticks in before.items()), "workers without a master are ended"
        up.wait_for_step(5)
        outcome = Elastic(runner, up).stop()
    assert_all_is_right(outcome, endless_reference)
    assert "MasterResumed" not in {entry["@type"] for entry in runner.journal()}
    assert len(before) == 4
    assert runner.left_over() == []


# --- one at a time, to see which of them a change breaks -------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_node_joins_again_and_is_no_stranger(start: Callable[..., Any]) -> None:
    with start() as run:
        run.command("kill", "node2")
        run.up.wait_for_loss("node2")
        run.command("add", "node2")
        run.up.wait_for("node2 taken in; pipelines grow")
        run.up.wait_for_steps(5)
        run.command("kill", "node2")
        run.up.wait_for_loss("node2")
        run.up.wait_for_steps(5)
        outcome = run.stop()
    assert [each[1:] for each in recoveries(outcome)][1] == ("absorb", ("node2",))
    assert [each[0] for each in recoveries(outcome)] == ["connection_lost", "joined", "connection_lost"]
    assert nodes_of(outcome) == ["node0", "node1", "node3"]


@pytest.mark.slow
def test_a_node_is_drained_and_a_spare_takes_its_place(start: Callable[..., Any], tmp_path: Path) -> None:
    """On request, and because a notice of termination comes, which node3 alone is to find."""
    notice = f"grep -qa node3 /proc/$PPID/cmdline && cat {tmp_path}/notice"
    given = (f"control.notice_command={notice}", "control.notice_interval_s=0.5")
    with start(*(word for setting in given for word in ("--set", setting))) as run:
        run.command("drain", "node1")
        run.up.wait_for("node1 has left")
        run.command("add", "node4")
        run.up.wait_for("node4 taken in; pipelines grow")
        (tmp_path / "notice").write_text("taken away at noon\n")
        assert "at noon" in run.up.wait_for("node3 is to be terminated")
        run.up.wait_for("node3 has left")
        run.up.wait_for_steps(5)
        outcome = run.stop()
    assert [each[0] for each in recoveries(outcome)] == ["drained", "joined", "drained"]
    assert nodes_of(outcome) == ["node0", "node2", "node4"]


@pytest.mark.slow
def test_the_only_holder_of_a_layer_hands_it_over_before_it_leaves(start: Callable[..., Any]) -> None:
    with start("--pipelines", "1", "-f", "0", nodes=("--local", "2")) as run:
        run.command("drain", "node1")
        run.up.wait_for("node1 has left")
        run.up.wait_for_steps(5)
        outcome = run.stop()
    assert nodes_of(outcome) == ["node0"]
    (recovery,) = outcome.recoveries
    assert recovery["cause"] == "drained"
    assert recovery["bytes_moved"] > 0


@pytest.mark.slow
def test_a_worker_that_ends_by_itself_is_started_again_in_place(start: Callable[..., Any], runner: Runner) -> None:
    with start() as run:
        for number in (signal.SIGKILL, signal.SIGSEGV):
            before = worker_pids(runner)
            os.kill(before["node1"], number)
            run.up.wait_for(f"the worker of node1 ended (killed by signal {number.value}")
            run.up.wait_for("node1 taken in; worker restarted")
            run.up.wait_for_steps(3)
            after = worker_pids(runner)
            assert after.pop("node1") != before.pop("node1")
            assert after == before, "all others keep their processes"
            assert all(started_at(pid) for pid in after.values())
        outcome = run.stop()
    assert [each[:2] for each in recoveries(outcome)][1::2] == [("joined", "restart_worker")] * 2
    assert [each[0] for each in recoveries(outcome)][::2] == ["worker_exited"] * 2
    assert nodes_of(outcome) == ["node0", "node1", "node2", "node3"]
    assert "NodeLost" not in {entry["@type"] for entry in runner.journal()}
    assert_crash_is_told(runner)


@pytest.mark.slow
def test_a_node_whose_worker_ends_again_and_again_is_given_up(start: Callable[..., Any], runner: Runner) -> None:
    with start() as run:
        for _ in range(3):
            os.kill(worker_pids(runner)["node3"], signal.SIGKILL)
            run.up.wait_for("node3 taken in; worker restarted")
            run.up.wait_for_steps(2)
        os.kill(worker_pids(runner)["node3"], signal.SIGKILL)
        run.up.wait_for("node3 lost: worker process")
        run.up.wait_for_loss("node3")
        run.up.wait_for_steps(3)
        outcome = run.stop()
    assert nodes_of(outcome) == ["node0", "node1", "node2"]


@pytest.mark.slow
def test_a_frozen_node_costs_its_lease_and_is_ended(start: Callable[..., Any], runner: Runner) -> None:
    with start(*SHORT_LEASE) as run:
        frozen = {pid: started_at(pid) for pid in (worker_pids(runner)["node2"],)}
        freeze(runner, "node2")
        run.up.wait_for("node2 lost: silent for")
        run.up.wait_for_loss("node2")
        run.up.wait_for_steps(5)
        for pid, ticks in frozen.items():
            assert started_at(pid) != ticks, "its worker was ended"
        outcome = run.stop()
    ((cause, _, nodes),) = recoveries(outcome)
    assert (cause, nodes) == ("lease_expired", ("node2",))
    (recovery,) = outcome.recoveries
    assert_cost_its_lease(recovery)


@pytest.mark.slow
def test_what_cannot_be_added_or_drained_is_refused_with_a_reason(start: Callable[..., Any]) -> None:
    with start(nodes=("--local", "2")) as run:
        assert "node1" in run.refused("add", "node1")
        assert "'node9'" in run.refused("add", "node9")
        assert "'node9'" in run.refused("drain", "node9")
        assert "'node9'" in run.refused("kill", "node9")
        run.command("kill", "node1")
        run.up.wait_for_loss("node1")
        assert "node1 is lost" in run.refused("drain", "node1")
        run.up.wait_for_steps(2)
        run.stop()
