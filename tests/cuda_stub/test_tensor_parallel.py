"""`oobleck up` with two devices a stage over the stub: sums that no host waits for, with a worker lost among them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.elastic import ENDLESS, LLAMA_TOLERANCE, assert_all_is_right, each_loss, stopped
from tests.e2e.harness import Runner
from tests.e2e.node_processes import Nodes
from tests.e2e.test_sections import WIDE
from tools.gpu.stub import device as stub

from . import test_runs
from .members import wait_until

pytestmark = pytest.mark.timeout(1800)
runner = test_runs.runner
_WITHIN_S = 240.0
_LOSSES = (
    # act, moment, and how many of these come before: the stage's own sums, most of them, are among these
    ("kill", "sums", 7),
    ("freeze", "sums", 20),
    ("kill", "computes", 300),
    ("break_device", "sums", 33),
)


@pytest.fixture
def cluster(runner: Runner, tmp_path: Path) -> Iterator[test_runs.Cluster]:
    nodes = Nodes(runner, tmp_path)
    job = test_runs.job_file(runner, WIDE)
    yield test_runs.Cluster(runner, nodes, stub.Control(runner.directory), job, devices_per_node=2)
    nodes.close()


def test_stages_of_two_devices_lose_workers_amid_sums_that_no_host_waits_for(cluster: test_runs.Cluster) -> None:
    """Whatever was computed from parts of sums is forgotten: the losses are those of one process."""
    runner = cluster.runner
    with cluster.up("--steps", str(ENDLESS), "--set", "tensor_parallel=2") as up:
        up.wait_for_step(3)
        for device, loss in enumerate(_LOSSES):
            _suffer(cluster, device, *loss)
            up.wait_for_step(sum(entry["@type"] == "StepDone" for entry in runner.journal()))
        outcome = stopped(runner, up)
    reference = each_loss(cluster.job, runner.directory / "cache")
    assert_all_is_right(outcome, reference, tolerance=LLAMA_TOLERANCE, loses_steps=None)


def _suffer(cluster: test_runs.Cluster, device: int, act: str, moment: str, after: int) -> None:
    """Let a worker be lost, and wait until all train again."""
    node, control = f"node{device // 2}", cluster.control
    before = cluster.runner.pids(node, "worker*")
    told = len(cluster.runner.journal())
    control.arm(device, act, moment, after=after)
    wait_until(lambda: not control.armed, within_s=_WITHIN_S)
    wait_until(lambda: not set(before) <= set(cluster.runner.pids(node, "worker*")), within_s=_WITHIN_S)
    control.set(device, "device_error", 0)
    wait_until(lambda: test_runs.trains_again(cluster, since=told), within_s=_WITHIN_S, poll_s=0.3)
