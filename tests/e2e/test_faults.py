"""Kinds of failure that are not a killed node, done to real processes: what each leads to, and that no loss changes.

Killed nodes are in test_losses.py, drains, joins and nodes that stay away in test_commands.py and test_elastic.py,
masters in test_master.py, cut networks in test_network.py, and all of them at random in test_stress.py.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from oobleck.errors import ExitCode
from oobleck.runtime.files.run_dir import RunDirectory
from tests.openssh import OpenSSH, needs_openssh, serve_openssh

from .elastic import ENDLESS, Reference, assert_losses, nodes_of, recoveries
from .harness import TAG, Runner, oobleck, started_at, worker_pids

SCRIPT = Path(__file__).with_name("failing_job.py")

SOON = ("--set", "control.rejoin_after_s=1", "--set", "control.lease_s=1.5")
"""Lost nodes are noticed and tried again after less time than by default."""


def pid_of(runner: Runner, node: str, role: str) -> int:
    (pid,) = runner.pids(node, role)
    return pid


@pytest.mark.slow  # with others in test_elastic.py
def test_an_agent_is_killed_under_its_worker_and_another_is_given_notice(
    start: Callable[..., Any], runner: Runner
) -> None:
    with start(*SOON) as run:
        # An agent is killed while its worker lives: its worker ends too, and the node comes back by itself.
        orphan = worker_pids(runner)["node2"]
        birth = started_at(orphan)
        os.kill(pid_of(runner, "node2", "agent"), signal.SIGKILL)
        run.up.wait_for("node2 lost: its connection was lost")
        run.up.wait_for("node2 taken in; pipelines grow")
        assert started_at(orphan) != birth, "a worker without its agent ends"
        run.up.wait_for_steps(3)
        # A node is given notice: it gives its state away, and leaves.
        os.kill(pid_of(runner, "node3", "agent"), signal.SIGTERM)
        run.up.wait_for("node3 is to be terminated: its agent was sent SIGTERM")
        run.up.wait_for("node3 has left")
        run.up.wait_for_steps(3)
        outcome = run.stop()
    assert [(cause, nodes) for cause, _, nodes in recoveries(outcome)] == [
        ("connection_lost", ("node2",)),
        ("joined", ("node2",)),
        ("drained", ("node3",)),
    ]
    assert nodes_of(outcome) == ["node0", "node1", "node2"]


def test_workers_fail_in_every_way_and_the_same_exception_on_all_ranks_ends_the_job(
    runner: Runner, tmp_path: Path
) -> None:
    def fail(worker: str, kind: str) -> None:
        (tmp_path / "new").write_text(kind)
        (tmp_path / "new").rename(tmp_path / worker)  # whole, or not there

    given = ("--tag", TAG, "--steps", str(ENDLESS), "--set", "num_pipelines=2", "--set", "torch_threads=1")
    with runner.up(*given, "--", str(tmp_path), nodes=("--local", "4", str(SCRIPT))) as up:
        up.wait_for_step(3)
        for kind, words in (
            ("exception", "ValueError: the model has a bug"),
            ("segfault", "killed by signal 11"),
            ("memory", "can't allocate memory"),
        ):
            fail(str(worker_pids(runner)["node1"]), kind)
            assert words in up.wait_for("warning: the worker of node1 ended")
            up.wait_for("node1 taken in; worker restarted")
            up.wait_for_steps(2)
        fail("all", "exception")
        outcome = up.finish()
    assert outcome.exit_code == 1, outcome.output
    reason = outcome.output[outcome.output.rindex("an error ended the workers") :]
    assert "Traceback" in reason
    assert "the model has a bug" in reason, "the script's own words"
    summary = outcome.summary
    # Those that fail all at once may go back to a checkpoint before the last of them has failed, and then lose steps.
    assert (summary["samples_repeated"], summary["samples_missing"]) == (0, 0)
    singly = [entry for entry in runner.journal() if entry["@type"] == "RecoveryDone"][:6]
    assert [entry["steps_lost"] for entry in singly] == [0] * 6
    causes = [entry["loss"] or entry["cause"] for entry in singly]
    # On a busy machine, its peers may be heard before the agent that has seen it end.
    assert {*causes[::2]} <= {"worker_exited", "peer_failed"}
    assert causes[1::2] == ["joined"] * 3
    assert runner.left_over() == []


@pytest.mark.slow  # with others in test_elastic.py
def test_past_the_last_copy_of_a_layer_the_run_ends_and_names_the_layers(runner: Runner) -> None:
    settings = ("--pipelines", "1", "-f", "0", "--steps", str(ENDLESS))
    with runner.up("--job", str(runner.job_file()), *settings, nodes=("--local", "2")) as up:
        up.wait_for_step(5)
        oobleck("kill", "node1", "--tag", TAG, "--base-dir", str(runner.base_dir))
        outcome = up.finish()
    assert outcome.exit_code == 1, outcome.output
    assert "node1" in outcome.summary["reason"]
    assert "layer" in outcome.summary["reason"]
    assert runner.left_over() == []


# --- a whole machine, as far as SSH can tell -----------------------------------------------------------------------


@pytest.fixture
def machines(runner: Runner, tmp_path: Path) -> Any:
    """Three nodes on one machine, and delta on another, which can be frozen as a whole."""
    environment = {"TMPDIR": str(runner.temporary), "HOME": str(runner.directory)}
    hostfile, config = tmp_path / "hosts.txt", tmp_path / "ssh_config"
    with (
        serve_openssh(tmp_path / "one", environment=environment) as one,
        serve_openssh(tmp_path / "two", environment=environment) as two,
    ):
        hostfile.write_text("alpha\nbeta\ngamma\ndelta\n")
        config.write_text(one.host_config(["alpha", "beta", "gamma", "epsilon"]) + two.host_config(["delta"]))
        yield hostfile, config, two


def everything_on(runner: Runner, node: str, server: OpenSSH) -> list[psutil.Process]:
    ids = [pid_of(runner, node, "agent"), pid_of(runner, node, "worker0")]
    return [server.process, *server.process.children(recursive=True), *map(psutil.Process, ids)]


@pytest.mark.slow
@needs_openssh
def test_a_machine_that_was_frozen_finds_out_and_joins_anew_and_the_command_that_names_nodes_is_followed(
    start: Callable[..., Any], runner: Runner, machines: tuple[Path, Path, OpenSSH]
) -> None:
    hostfile, config, two = machines
    given = (*SOON, "--set", "control.connect_timeout_s=1.5")
    hosts = ("--hosts-from", f"cat {hostfile}", "--hosts-every", "500ms")
    with start(*given, nodes=(*hosts, "--ssh-config", str(config), "--no-check")) as run:
        frozen = everything_on(runner, "delta", two)
        worker = worker_pids(runner)["delta"]
        birth = started_at(worker)
        for process in frozen:
            process.suspend()
        run.up.wait_for("delta lost: silent for")
        run.up.wait_for_loss("delta")
        run.up.wait_for_steps(3)
        assert started_at(worker) == birth, "nobody can reach it, so it is frozen still"
        for process in frozen:
            process.resume()
        run.up.wait_for("delta taken in; pipelines grow")
        assert started_at(worker) != birth, "what the machine ran before has ended"
        run.up.wait_for_steps(3)

        hostfile.write_text("alpha\nbeta slotz=1\ngamma\ndelta\n")
        assert "unknown key 'slotz'" in run.up.wait_for("warning: --hosts-from is not followed")
        hostfile.unlink()
        assert "failed with exit status 1" in run.up.wait_for("warning: --hosts-from is not followed")
        hostfile.write_text("beta\ngamma\ndelta\nepsilon\n")
        run.up.wait_for("alpha has left")
        run.up.wait_for("epsilon taken in; pipelines grow")
        run.up.wait_for_steps(3)
        outcome = run.stop()
    assert nodes_of(outcome) == ["beta", "delta", "epsilon", "gamma"]


# --- a trace of all of it ------------------------------------------------------------------------------------------

TRACE = {
    "version": 1,
    "duration_s": 280,
    "nodes": ["a", "b", "c", "d", "e"],
    "start": ["a", "b", "c", "d"],
    "events": [
        {"t_s": 10, "kind": "worker_crashed", "node": "b"},
        {"t_s": 40, "kind": "node_lost", "node": "c"},
        {"t_s": 80, "kind": "node_joined", "node": "e"},
        {"t_s": 90, "kind": "partition", "nodes": ["a"]},
        {"t_s": 100, "kind": "heal"},
        {"t_s": 150, "kind": "master_crashed", "down_s": 10},
        {"t_s": 200, "kind": "node_frozen", "node": "d"},
        {"t_s": 202, "kind": "node_thawed", "node": "d"},
        {"t_s": 220, "kind": "notice", "node": "b", "grace_s": 30},
        {"t_s": 250, "kind": "node_lost", "node": "b"},
    ],
}


@pytest.mark.slow
def test_a_trace_is_played_on_a_new_run(runner: Runner, endless_reference: Reference, tmp_path: Path) -> None:
    trace, summary_file = tmp_path / "trace.json", tmp_path / "summary.json"
    trace.write_text(json.dumps(TRACE))
    of_the_run = ("--tag", TAG, "--base-dir", str(runner.base_dir), "--plain")
    given = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), *of_the_run)
    with runner.background(
        "chaos", str(trace), "--local", "4", "--speedup", "10", *given, "--summary", str(summary_file)
    ) as played:
        output, _ = played.communicate(timeout=120)
    assert played.returncode == 0, output
    told = [line.removeprefix("chaos: ") for line in output.splitlines() if line.startswith("chaos: ")]
    assert all(words in told[0] for words in ("1 heal", "1 partition"))
    (refused,) = [line for line in told if line.startswith("250 s: ")]
    assert "node1" in refused
    assert len(told) == 2 + len(TRACE["events"])
    summary = json.loads(summary_file.read_text())
    met = [(recovery["cause"], recovery["nodes"]) for recovery in summary["recoveries"]]
    assert met == [
        ("worker_exited", ["node1"]),
        ("joined", ["node1"]),
        ("connection_lost", ["node2"]),
        ("joined", ["node4"]),
        ("drained", ["node1"]),
    ], output
    assert (summary["steps_lost"], summary["samples_repeated"], summary["samples_missing"]) == (0, 0, 0)
    assert_losses(summary["losses"], endless_reference)
    assert runner.left_over() == []


@pytest.mark.slow
def test_a_master_is_crashed_under_a_run_that_somebody_else_has_started(runner: Runner, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    events = [
        {"t_s": 0, "kind": "node_slow", "node": "node1", "factor": 2},
        {"t_s": 2, "kind": "node_slow", "node": "node1", "factor": 1},
        {"t_s": 3, "kind": "master_crashed", "down_s": 1},
    ]
    nodes = ["node0", "node1", "node2", "node3"]
    trace.write_text(json.dumps({"version": 1, "duration_s": 4, "nodes": nodes, "events": events}))
    with runner.up("--job", str(runner.job_file()), "--steps", str(ENDLESS)) as up:
        up.wait_for_step(3)
        first = up.process.pid
        played = oobleck("chaos", str(trace), "--tag", TAG, "--base-dir", str(runner.base_dir))
        assert played.returncode == 0, played.stdout + played.stderr
        assert up.process.wait(10) == -signal.SIGKILL
        up.wait_for("a new master takes over")  # it writes to where the first one did
        assert RunDirectory(base_dir=runner.base_dir, tag=TAG).master.pid != first
        up.wait_for_steps(3)
        stopped = oobleck("stop", TAG, "--base-dir", str(runner.base_dir))
        assert stopped.returncode == 0, stopped.stderr
        up.process.stdout.read()
    summary = json.loads(up.summary_path.read_text())
    assert summary["exit_code"] == 0
    assert (summary["steps_lost"], summary["samples_repeated"], summary["samples_missing"]) == (0, 0, 0)
    notices = [entry["text"] for entry in runner.journal() if entry["@type"] == "Notice"]
    assert [text for text in notices if text.startswith("on request: ")][:2] == [
        "on request: node1 takes 2 times as long",
        "on request: node1 takes 1 times as long",
    ]
    assert runner.left_over() == []


@pytest.mark.slow
def test_nodes_that_vanish_after_their_notice_end_the_run_soon_and_resumably(runner: Runner) -> None:
    """As at a time limit: a scheduler gives notice, and ends everything moments later. Nobody closes a connection."""
    nodes = ("node0", "node1", "node2")
    options = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--set", "checkpoint.save_steps=100000")
    with runner.up(*options, nodes=("--local", "3")) as up:
        up.wait_for_step(5)
        for node in nodes:
            runner.signal(node, "worker*", signal.SIGSTOP)  # so the step in flight is not finished in time
            runner.signal(node, "agent", signal.SIGTERM)
        for node in nodes:
            up.wait_until_said(f"{node} is to be terminated")
            runner.signal(node, "agent", signal.SIGSTOP)
        outcome = up.finish(timeout_s=30.0)
        for node in nodes:
            runner.signal(node)
    assert outcome.exit_code == ExitCode.RESUMABLE, outcome.output
    assert "most nodes have fallen silent" not in outcome.output
