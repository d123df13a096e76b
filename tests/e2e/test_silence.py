"""Processes are stopped for a while (SIGSTOP), and go on: the master, agents, workers, the fork server.

Nobody is lost where most fall silent together, and the losses are those of one process.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil
import pytest

from .elastic import ENDLESS, TOLERANCE, Elastic, Reference, assert_all_is_right
from .harness import Runner, Up

STALLS_S = (2.8, 5.0)
NUM_NODES = 4
PATIENT = ("--set", "control.orphan_timeout_s=600")
"""As by default; other runs here have less, so that nothing outlives a test for long."""


def agents_of(runner: Runner) -> list[int]:
    return [pid for node in range(NUM_NODES) for pid in pids(runner, f"node{node}", "agent")]


def pids(runner: Runner, node: str, processes: str) -> list[int]:
    return [int(path.read_text()) for path in sorted(runner.agent_directory(node).glob(f"{processes}.pid"))]


def stall(pids: Sequence[int], seconds: float) -> None:
    """Stop processes, and let them go on; some may have ended by then."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(seconds)


def losses_of_nodes(runner: Runner) -> list[dict[str, Any]]:
    return [entry for entry in runner.journal() if entry["@type"] == "NodeLost"]


@pytest.mark.timeout(300)
def test_masters_and_agents_that_are_stopped_for_seconds_lose_nobody(
    runner: Runner, endless_reference: Reference, start: Callable[..., Any]
) -> None:
    with start() as run:
        for seconds in STALLS_S:
            stall([run.up.process.pid], seconds)
            run.up.wait_for_steps(5)
        stall(agents_of(runner), 5.0)
        run.up.wait_for_steps(5)
        assert losses_of_nodes(runner) == []
        run.stop()
    assert run.outcome.summary["recoveries"] == []


def test_a_master_that_is_stopped_while_it_starts_begins_all_the_same(
    runner: Runner, endless_reference: Reference
) -> None:
    with runner.up("--job", str(runner.job_file()), "--steps", str(ENDLESS)) as up:
        up.wait_for("starts on")
        stall([up.process.pid], 12.0)  # longer than any handshake may take
        up.wait_for_step(5)
        Elastic(runner, up).command_stop()
        assert_all_is_right(up.finish(), endless_reference)
    assert losses_of_nodes(runner) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("whose", ["master", "agents", "workers"])
def test_a_minute_of_silence_loses_nobody(runner: Runner, start: Callable[..., Any], whose: str) -> None:
    with start(*PATIENT) as run:
        match whose:
            case "master":
                stall([run.up.process.pid], 60.0)
            case "agents":
                stall(agents_of(runner), 60.0)
            case "workers":
                stall([pid for node in range(NUM_NODES) for pid in pids(runner, f"node{node}", "worker*")], 60.0)
        run.up.wait_for_steps(5)
        assert losses_of_nodes(runner) == []
        run.stop()


class Stalls:
    """Stops one or another of a run's processes, for a while that is drawn from a seed."""

    def __init__(self, runner: Runner, up: Up, seed: int, longest_s: float) -> None:
        self.runner = runner
        self.up = up
        self.random = random.Random(seed)
        self.longest_s = longest_s
        self.done: list[str] = []

    def strike(self) -> None:
        kinds = {
            "the master": [self.up.process.pid],
            "all agents": agents_of(self.runner),
            "all workers": self._all("worker*"),
            "all nodes": self._all("*"),
            "the fork server": self._fork_server(),
            "an agent": pids(self.runner, self._node(), "agent"),
            "a worker": pids(self.runner, self._node(), "worker*"),
            "a node": pids(self.runner, self._node(), "*"),
        }
        kind = self.random.choice(sorted(kinds))
        seconds = 0.1 * (self.longest_s / 0.1) ** self.random.random()  # short ones as often as long ones
        self.done.append(f"{kind} for {seconds:.2f} s")
        stall(kinds[kind], seconds)

    def _node(self) -> str:
        return f"node{self.random.randrange(NUM_NODES)}"

    def _all(self, processes: str) -> list[int]:
        return [pid for node in range(NUM_NODES) for pid in pids(self.runner, f"node{node}", processes)]

    def _fork_server(self) -> list[int]:
        """The one that workers are forked from, which bear its command line."""
        found: list[int] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_server = "oobleck.training.fork_server" in process.cmdline()
                if is_server and process.environ().get("TMPDIR") == str(self.runner.temporary):
                    found.append(process.pid)
        children = {pid for pid in found if psutil.pid_exists(pid) and psutil.Process(pid).ppid() in found}
        return [pid for pid in found if pid not in children]


def ride_out(runner: Runner, reference: Reference, *, seed: int, stalls: int, longest_s: float) -> None:
    """Let so many stalls strike a run; it must not end, and its losses must be those of one process."""
    options = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--set", "control.rejoin_after_s=2", *PATIENT)
    with runner.up(*options, nodes=("--local", str(NUM_NODES))) as up:
        up.wait_for_step(5)
        storm = Stalls(runner, up, seed, longest_s)
        for _ in range(stalls):
            storm.strike()
            up.wait_for_steps(storm.random.randint(2, 20))
        Elastic(runner, up).command_stop()
        outcome = up.finish()
    story = f"seed {seed}: {storm.done}\n{outcome.output}"
    assert outcome.exit_code == 0, story
    assert (outcome.summary["samples_repeated"], outcome.summary["samples_missing"]) == (0, 0), story
    expected = reference(len(outcome.losses))
    gaps = [abs(one - other) for one, other in zip(outcome.losses, expected, strict=True)]
    assert max(gaps) < TOLERANCE, f"step {gaps.index(max(gaps)) + 1} differs by {max(gaps)}; {story}"
    assert runner.left_over() == [], story


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_a_storm_of_stalls_ends_no_run(runner: Runner, endless_reference: Reference, seed: int) -> None:
    ride_out(runner, endless_reference, seed=seed, stalls=8, longest_s=60.0)
