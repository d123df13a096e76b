"""Training on the nodes of a real Ray cluster of three raylets, one of which is killed.

Ray is no part of the extra `test`, for its size: `pip install 'oobleck-train[ray]'` beside it, and run this file.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import words_of

from .elastic import ENDLESS, PACED, Reference, assert_all_is_right, nodes_of, recoveries, recoveries_in, stopped
from .harness import Runner, oobleck, started_at, worker_pids

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: it takes 250 MB"),
    pytest.mark.slow,  # tests/runtime/launchers/test_dial_in.py has nodes that dial in, without Ray
]

NAMES = ("r0", "r1", "r2")


class RayCluster:
    """A cluster under way."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self, name: str) -> None:
        """Kill a raylet."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"kill {name}\n")
        self._process.stdin.flush()
        assert self._read() == f"kill {name}"


@pytest.fixture
def cluster(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short, for sockets' paths are
    (tmp_path / ".oobleck").symlink_to(runner.base_dir)  # nodes keep logs and checkpoints where other runs do
    command = [sys.executable, str(Path(__file__).with_name("ray_cluster.py")), directory, *NAMES]
    process = subprocess.Popen(
        command,
        env={**runner.environment, "HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        cluster = RayCluster(process)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        below = psutil.Process(process.pid).children(recursive=True)
        process.communicate()
        psutil.wait_procs(below, timeout=20)
        shutil.rmtree(directory, ignore_errors=True)


def test_a_run_on_ray_loses_a_raylet_and_its_next_master_finds_the_actors(
    runner: Runner, endless_reference: Reference, cluster: RayCluster
) -> None:
    given = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--no-check")
    with runner.up(*given, nodes=("--ray", PACED)) as first:
        first.wait_for_step(5)
        workers = {node: started_at(pid) for node, pid in worker_pids(runner).items()}
        first.process.kill()
        first.process.wait()
        with runner.up(*given, nodes=("--ray", PACED)) as second:
            second.wait_for_steps(5)
            now = {node: started_at(pid) for node, pid in worker_pids(runner).items()}
            assert now == workers, "none was started again"
            shown = oobleck("status", "--json", "--base-dir", str(runner.base_dir)).stdout
            assert shown.count('"origin": "Ray node ') == len(NAMES)
            cluster.kill("r2")
            while not any("r2" in nodes for _, _, nodes in recoveries_in(runner.journal())):
                second.wait_for("] step ")
            for left in (runner.agent_directory("r2"), runner.memory / "r2"):
                shutil.rmtree(left, ignore_errors=True)  # of a machine that does not come back
            second.wait_for_steps(5)
            outcome = stopped(runner, second)
    assert_all_is_right(outcome, endless_reference)
    ((cause, _, lost),) = recoveries(outcome)
    assert lost == ("r2",)
    assert cause in ("drained", "connection_lost"), "its process has time to say farewell, or it has not"
    assert nodes_of(outcome) == ["r0", "r1"]
    assert [process for process in runner.processes() if "node" in words_of(process)] == [], "Ray has its nodes back"
