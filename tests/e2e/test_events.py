"""`oobleck events` after each kind of failure was really done to processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from .elastic import PACED
from .harness import SHORT_LEASE, TAG, Runner, Up, incidents, oobleck, worker_pids

pytestmark = pytest.mark.slow

ENDLESS = "--steps", "5000"


def newest(runner: Runner, failure: str, node: str | None, *, timeout_s: float = 40.0) -> dict[str, Any]:
    """Wait until the newest incident is over, and is this one."""
    deadline_s = time.monotonic() + timeout_s
    found: list[dict[str, Any]] = []
    while time.monotonic() < deadline_s:
        found = incidents(runner)
        if found and found[-1]["ended_s"] is not None:
            root = found[-1]["root"]
            if (root["failure"], root["node"]) == (failure, node):
                return found[-1]
        time.sleep(0.5)
    raise AssertionError(f"no {failure} of {node}: {found}")


def agent_pid(runner: Runner, node: str) -> int:
    (pid,) = runner.pids(node, "agent")
    return pid


def wait_until_ready_again(up: Up, node: str) -> None:
    up.wait_for(f"{node} device 0 is ready")
    up.wait_for_steps(2)


def test_each_failure_is_named_with_its_node_evidence_and_cost(runner: Runner) -> None:
    """One run: workers are killed and crash; a node freezes; one is announced to go."""
    with runner.up("--job", str(runner.job_file()), *ENDLESS, *SHORT_LEASE, nodes=("--local", "4", PACED)) as up:
        up.wait_for_step(2)

        os.kill(worker_pids(runner)["node1"], signal.SIGKILL)
        killed = newest(runner, "killed", "node1")
        assert killed["root"]["entry"]["end"] == {"@type": "Killed", "signal": 9, "is_out_of_memory": False}
        assert killed["responses"][0]["measure"] == "worker_restarted"
        assert killed["steps_lost"] == 0
        wait_until_ready_again(up, "node1")
        logs = [path.read_text() for path in (runner.base_dir / TAG).glob("agent*.log")]
        log = "\n".join(line for text in logs for line in text.splitlines() if "[node0:0 generation " in line)
        fenced = log.index("is fenced by generation 2")
        ordered = log.index("generation 2] follows a plan", fenced)
        assert log.index("adopts the plan of generation 2", ordered), "it can be followed in one worker's lines"

        os.kill(worker_pids(runner)["node2"], signal.SIGSEGV)
        assert newest(runner, "crashed", "node2")["root"]["entry"]["end"]["signal"] == 11
        wait_until_ready_again(up, "node2")

        frozen = [psutil.Process(pid) for pid in (agent_pid(runner, "node3"), worker_pids(runner)["node3"])]
        for process in frozen:
            process.suspend()
        incident = newest(runner, "frozen", "node3")
        assert incident["root"]["entry"]["loss"]["silent_s"] > 0
        assert incident["lost"] == ["node3"]
        for process in frozen:
            with suppress(psutil.NoSuchProcess):  # the master has ended what it could not hear any more
                process.resume()

        os.kill(agent_pid(runner, "node2"), signal.SIGTERM)
        newest(runner, "termination", "node2")

        told = oobleck("events", TAG, "--base-dir", str(runner.base_dir)).stdout
        assert all(f"{node}: " in told for node in ("node1", "node2", "node3"))
        assert oobleck("stop", TAG, "--base-dir", str(runner.base_dir)).returncode == 0
        assert up.finish().exit_code == 0


def test_what_goes_wrong_in_the_code_of_users_is_told_from_broken_machines(runner: Runner, tmp_path: Path) -> None:
    """One run: a worker wants more memory than there is; another ends by itself; then all meet the same error."""
    script = str(Path(__file__).with_name("failing_job.py"))
    settings = ("--tag", TAG, *ENDLESS, "--set", "num_pipelines=2", "--set", "torch_threads=1")
    with runner.up(*settings, "--", str(tmp_path), nodes=("--local", "4", script)) as up:
        up.wait_for_step(2)
        for kind, failure, node, told in (
            ("memory", "out_of_memory", "node1", "allocate"),
            ("exit", "exited", "node2", "exit"),
        ):
            trap = tmp_path / str(worker_pids(runner)[node])
            trap.write_text(kind)
            assert told in newest(runner, failure, node)["root"]["evidence"]
            trap.unlink()
            wait_until_ready_again(up, node)
        (tmp_path / "all").write_text("exception")
        outcome = up.finish()
    assert outcome.exit_code == 1
    *_, fatal = found = incidents(runner)
    assert "user_exception" in [incident["root"]["failure"] for incident in found]
    # Workers that are started again may meet it before they train, where their layers are tried.
    assert fatal["root"]["failure"] in ("user_exception", "job_error")
    assert fatal["is_fatal"]
    assert "the model has a bug" in fatal["root"]["evidence"]


def test_data_that_is_not_there_is_told_before_virtual_nodes_start(runner: Runner) -> None:
    outcome = runner.run("--job", str(runner.job_file()), "--set", "data.paths=[/no/such/text]", nodes=("--local", "2"))
    assert outcome.exit_code == 78
    assert "data.paths: /no/such/text does not exist on this machine" in outcome.output


def test_a_loss_that_is_no_number_is_told(runner: Runner) -> None:
    outcome = runner.run(
        "--job", str(runner.job_file()), "--set", "optimizer.learning_rate=1e200", "--set", "optimizer.warmup_steps=0",
        "--steps", "8", nodes=("--local", "2"),
    )  # fmt: skip
    assert outcome.exit_code == 0
    (incident,) = incidents(runner)
    assert incident["root"]["failure"] == "bad_loss"
    assert "loss of nan" in incident["root"]["evidence"]


def test_metrics_are_written_and_served_while_a_run_goes_on(runner: Runner) -> None:
    address = runner.temporary / "metrics.sock"
    with runner.up(
        "--job", str(runner.job_file()), *ENDLESS, "--metrics", f"unix:{address}", nodes=("--local", "2")
    ) as up:
        up.wait_for_step(3)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(address))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while chunk := client.recv(65536):
                answer += chunk
        assert oobleck("stop", TAG, "--base-dir", str(runner.base_dir)).returncode == 0
        outcome = up.finish()
    served = dict(line.rsplit(" ", 1) for line in answer.decode().splitlines() if line.startswith("oobleck_"))
    assert float(served[f'oobleck_step_total{{run="{TAG}"}}']) >= 3
    assert 0 < float(served[f'oobleck_goodput{{run="{TAG}"}}']) < 1
    lines = (runner.base_dir / TAG / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses == outcome.losses
