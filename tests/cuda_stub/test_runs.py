"""`oobleck up` over the stub: torch's CUDA, NCCL between workers with a device each, one of them lost at any moment.

A fifth of CUDA_STUB_SEEDS is the number of losses, each of a seed of its own, rounded up to whole runs, each with one
for every moment.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.elastic import ENDLESS, TOLERANCE, Reference, assert_all_is_right, each_loss, stopped
from tests.e2e.harness import GPT2, Runner, Up, send_signal, started_at, worker_pids
from tests.e2e.node_processes import Nodes
from tools.gpu.stub import device as stub

from .members import wait_until

pytestmark = pytest.mark.timeout(1800)
_DEVICES = 4
_JOB = f"{GPT2}dropout: false\n"  # devices drop by numbers of their own
_RATES = ("learning_rate: 0.003", "learning_rate: 0.00003")
"""Of other tests, and of this one. At the former, sums in another order alone, in one process, make losses differ by
3e-10 after 120 steps and by 1e-7 after 200; at a tenth of it, by 1e-9 after 460."""
_LEASE_S = 15
_BUSY_S = 120.0
"""What a busy machine may add to any wait."""

# When a step, a save or a plan comes to the moment is the stub's to tell. A commit follows the last of a step's sums.
_MOMENTS = {
    "before a send": ("sends", 0),
    "while it receives": ("receives", 500),
    "in a sum of the last backward pass": ("sums", 0),
    "in the commit": ("has_summed", 3_000),
    "in the forward pass": ("computes", 0),
    "while communicators form": ("connects", 0),
    "in a save": ("copies_out", 0),
    "while others are aborted": ("aborts", 0),
}
_PROVOKED = ("connects", "aborts")
"""Moments of a recovery: another worker is killed for them."""
_ACTS = ("kill", "freeze", "break_links", "break_device")


@dataclass(frozen=True, slots=True)
class Loss:
    """What happens to which device's worker, and when."""

    device: int
    act: str
    when: str
    after: int

    @classmethod
    def of(cls, seed: int) -> Loss:
        chance = random.Random(seed)
        # As few seeds as there are moments have each of them, and all pairs come in turn.
        acts, moments = len(_ACTS), list(_MOMENTS)
        when = moments[(seed + seed // len(moments)) % len(moments)]
        return cls(chance.randrange(_DEVICES), _ACTS[seed % acts], when, chance.randint(1, 20))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes on the stub."""

    runner: Runner
    nodes: Nodes
    control: stub.Control
    job: Path
    devices_per_node: int = 1

    @property
    def num_nodes(self) -> int:
        return _DEVICES // self.devices_per_node

    @contextmanager
    def up(self, *options: str) -> Iterator[Up]:
        control = (f"control.lease_s={_LEASE_S}", f"control.start_timeout_s={10 * _BUSY_S}")
        given = ("--job", str(self.job), "--no-check", *options)
        for setting in ("device=cuda", *control):
            given += ("--set", setting)
        with self.runner.up(*given, nodes=("--dial-in", "127.0.0.1:0", "--nodes", str(self.num_nodes))) as up:
            file = shlex.split(up.wait_for(": oobleck node ").split(": oobleck node ")[1])[0]
            for node in range(self.num_nodes):
                first = node * self.devices_per_node
                devices = ",".join(map(str, range(first, first + self.devices_per_node)))
                self.nodes.start(_node(node), file, f"{_node(node)} devices={devices}")
            yield up
        self.nodes.close()

    def counts(self, moment: str) -> list[int]:
        return [self.control.get(device, moment) for device in range(_DEVICES)]


def _node(device: int) -> str:
    return f"node{device}"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    directory = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stub.environment(directory, devices=_DEVICES).items():
            patch.setenv(name, value)
        runner = Runner(directory)
        yield runner
        runner.close()


@pytest.fixture
def cluster(runner: Runner, tmp_path: Path) -> Iterator[Cluster]:
    nodes = Nodes(runner, tmp_path)
    yield Cluster(runner, nodes, stub.Control(runner.directory), job_file(runner))
    nodes.close()


@pytest.fixture(scope="module")
def reference(runner: Runner) -> Reference:
    """Losses of one process, on the CPU."""
    return each_loss(job_file(runner), runner.directory / "cache")


def job_file(runner: Runner, head: str = _JOB) -> Path:
    path = runner.job_file(head)
    text = path.read_text()
    assert _RATES[0] in text
    path.write_text(text.replace(*_RATES))
    return path


def _saves(directory: Path) -> tuple[str, ...]:
    return ("--set", f"checkpoint={{enabled: true, save_steps: 5, directory: {directory}}}")


def test_a_run_over_nccl_has_the_losses_of_one_process(cluster: Cluster, reference: Reference, tmp_path: Path) -> None:
    with cluster.up("--steps", str(ENDLESS), *_saves(tmp_path / "saved")) as up:
        up.wait_for_checkpoint(10)
        up.wait_for_steps(3)
        outcome = stopped(cluster.runner, up)
    assert_all_is_right(outcome, reference)
    for moment in ("connects", "sums", "sends", "receives", "copies_in", "copies_out", "computes"):
        assert min(cluster.counts(moment)) > 0, moment
    assert not outcome.recoveries


_FIRST_SEEDS = range(0, int(os.environ.get("CUDA_STUB_SEEDS", "20")) // 5, len(_MOMENTS))


@pytest.mark.parametrize("first", _FIRST_SEEDS)
def test_whenever_a_worker_is_lost_no_other_is_and_nothing_of_an_abort_is_used(
    cluster: Cluster, reference: Reference, tmp_path: Path, first: int
) -> None:
    struck: list[tuple[int, Loss]] = []  # with the number of steps so far
    with cluster.up("--steps", str(ENDLESS), *_saves(tmp_path / "saved")) as up:
        up.wait_for_step(3)
        for seed in range(first, first + len(_MOMENTS)):
            loss = Loss.of(seed)
            struck.append((_num_steps(cluster), loss))
            began_s = time.monotonic()
            _suffer(cluster, up, loss)
            print(f"seed {seed}: {loss}: {time.monotonic() - began_s:.1f} s", flush=True)
        outcome = stopped(cluster.runner, up)
    expected = reference(len(outcome.losses))
    apart = [
        (step, one - other)
        for step, (one, other) in enumerate(zip(outcome.losses, expected, strict=True), 1)
        if not abs(one - other) < TOLERANCE
    ]
    assert not apart, (struck, apart)
    assert_all_is_right(outcome, reference, loses_steps=None)


def _suffer(cluster: Cluster, up: Up, loss: Loss) -> None:
    """Let a worker be lost, and wait until all train again."""
    moment, delay_us = _MOMENTS[loss.when]
    before = _workers(cluster)
    touched = {_node(loss.device)}
    if moment in _PROVOKED:
        cluster.control.arm(loss.device, loss.act, moment)
        other = _node((loss.device + 1) % _DEVICES)
        touched.add(other)
        send_signal(before[other], signal.SIGKILL)
    else:
        cluster.control.arm(loss.device, loss.act, moment, after=loss.after, delay_us=delay_us)
    _wait_until(lambda: not cluster.control.armed)
    told = len(cluster.runner.journal())
    if loss.act == "break_device":
        wait_until(lambda: started_at(before[_node(loss.device)]) is None, within_s=_BUSY_S)
    time.sleep(0.2)
    cluster.control.set(loss.device, "links_broken", 0)
    cluster.control.set(loss.device, "device_error", 0)
    # Broken links cost nobody's worker: groups are formed again.
    replaced = touched if loss.act != "break_links" else touched - {_node(loss.device)}
    _wait_until(lambda: all(_workers(cluster)[node] != before[node] for node in replaced), within_s=2 * _LEASE_S)
    _wait_until(lambda: trains_again(cluster, since=told), within_s=2 * _LEASE_S)
    up.wait_for_step(_num_steps(cluster))  # reads what it has said, for which there is little room
    lost = {node for node, pid in _workers(cluster).items() if before[node] != pid}
    assert lost <= touched, (loss, lost)


def _wait_until(condition: Callable[[], object], *, within_s: float = 0.0) -> None:
    wait_until(condition, within_s=within_s + _BUSY_S, poll_s=0.3)


def _workers(cluster: Cluster) -> dict[str, int]:
    return worker_pids(cluster.runner)


def trains_again(cluster: Cluster, *, since: int) -> bool:
    """Return whether all nodes have committed steps under a plan, after the first entries."""
    journal = cluster.runner.journal()
    newest = max(at for at, entry in enumerate(journal) if entry["@type"] in ("PlanAdopted", "RecoveryStarted"))
    if (plan := journal[newest].get("plan")) is None:
        return False  # a recovery is under way
    in_plan = {node for pipeline in plan["pipelines"] for node in pipeline["nodes"]}
    num_steps = sum(entry["@type"] == "StepDone" for entry in journal[max(since, newest) :])
    return len(in_plan) == cluster.num_nodes and num_steps >= 2


def _num_steps(cluster: Cluster) -> int:
    return sum(entry["@type"] == "StepDone" for entry in cluster.runner.journal())
