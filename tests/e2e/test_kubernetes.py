"""The very commands of deploy/kubernetes, as their containers run them: each its own process, and nothing that listens
but the master. Pods are deleted, made again and lost, and the master's own is taken away.
"""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.errors import ExitCode
from tests.kubernetes_api import FakeAPI, event, pod, serve_kubernetes_api
from tests.kubernetes_manifests import command_of, environment_of

from .elastic import ENDLESS, PACED, Reference, assert_all_is_right, nodes_of, recoveries, stopped
from .harness import Runner, oobleck, started_at, worker_pids
from .node_processes import Nodes

MOUNTS = "/etc/oobleck/keys"


class Cluster:
    """What the controllers of Kubernetes do with the manifests, as far as processes see it."""

    def __init__(self, api: FakeAPI, nodes: Nodes, keys: Path, job: Path) -> None:
        self._api = api
        self._nodes = nodes
        self._keys = keys
        self._job = job
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._service = f"127.0.0.1:{probe.getsockname()[1]}"
        done = oobleck("keys", str(keys), "--master", self._service)
        assert done.returncode == 0, done.stderr

    @property
    def master(self) -> tuple[str, ...]:
        """The arguments of `oobleck up`."""
        words = command_of("Job")
        assert words[:2] == ["oobleck", "up"]
        places = {
            MOUNTS: str(self._keys),
            words[words.index("--job") + 1]: str(self._job),
            words[words.index("--dial-in") + 1]: self._service,
        }
        return tuple(places.get(word, word) for word in words[2:])

    def make(self, name: str, uid: str) -> None:
        """Start a pod."""
        fields = {"POD_NAME": name, "POD_NAMESPACE": "training", "POD_UID": uid, "POD_IP": "127.0.0.1", "MACHINE": "m3"}
        fields["OOBLECK_DOMAIN"] = ""  # as before Kubernetes 1.35
        variables = environment_of("StatefulSet", **fields)
        words = command_of("StatefulSet", **variables)
        assert words[:2] == ["oobleck", "node"]
        words[words.index("--master") + 1] = self._service
        arguments = [word.replace(MOUNTS, str(self._keys)) for word in words[2:]]
        self._nodes.start(name, *arguments, **variables)
        self._api.live.put(event("ADDED", pod(name, uid=uid)))

    def delete(self, name: str, uid: str) -> None:
        """Mark a pod as deleted. Nobody sends it SIGTERM: its kubelet does not answer."""
        self._api.live.put(event("MODIFIED", pod(name, uid=uid, deleted=True)))


@pytest.fixture
def cluster(runner: Runner, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with serve_kubernetes_api(tmp_path / "account") as api:
        for name, value in api.environment.items():
            monkeypatch.setenv(name, value)
        yield Cluster(api, nodes, tmp_path / "keys", runner.job_file())


@pytest.mark.slow  # tests/deploy holds the commands to the code, and tests/runtime/launchers what pods mean
def test_the_commands_of_the_manifests_train_and_follow_what_happens_to_their_pods(
    runner: Runner, endless_reference: Reference, nodes: Nodes, cluster: Cluster
) -> None:
    # On a busy machine the next master takes its time, and is to find the agents.
    given = ("--steps", str(ENDLESS), "--no-check", "--set", "control.orphan_timeout_s=250")
    with runner.up(*given, nodes=(*cluster.master, PACED)) as first:
        for index in range(4):
            cluster.make(f"oobleck-node-{index}", uid=f"uid-{index}")
        first.wait_for_step(5)
        cluster.delete("oobleck-node-3", uid="uid-3")
        first.wait_for("oobleck-node-3 has left")
        assert nodes.ended("oobleck-node-3") == 0
        cluster.make("oobleck-node-3", uid="uid-of-the-next")
        first.wait_for("oobleck-node-3 is added (pod training/oobleck-node-3 on m3)")
        first.wait_for("oobleck-node-3 taken in; pipelines grow")
        first.wait_for_steps(3)
        nodes.power_off("oobleck-node-2")
        for left in (runner.agent_directory("oobleck-node-2"), runner.memory / "oobleck-node-2"):
            shutil.rmtree(left, ignore_errors=True)  # of a machine that does not come back
        first.wait_for_loss("oobleck-node-2")
        first.wait_for_steps(3)
        workers = {node: started_at(pid) for node, pid in worker_pids(runner).items()}
        first.process.send_signal(signal.SIGTERM)
        first.wait_for("training continues without this master")
        assert first.process.wait(60) == ExitCode.RESUMABLE
        with runner.up(*given, nodes=(*cluster.master, PACED)) as second:
            second.wait_for_steps(5)
            now = {node: started_at(pid) for node, pid in worker_pids(runner).items()}
            stayed = [f"oobleck-node-{index}" for index in (0, 1, 3)]
            assert all(now[node] == workers[node] is not None for node in stayed)
            status = oobleck("status", "--json", "--base-dir", str(runner.base_dir))
            assert status.stdout.count("pod training/oobleck-node-") >= 4
            outcome = stopped(runner, second)
    assert_all_is_right(outcome, endless_reference)
    assert [(cause, lost) for cause, _, lost in recoveries(outcome)] == [
        ("drained", ("oobleck-node-3",)),
        ("joined", ("oobleck-node-3",)),
        ("connection_lost", ("oobleck-node-2",)),
    ]
    assert nodes_of(outcome) == stayed
    nodes.close()
    assert runner.left_over() == []
