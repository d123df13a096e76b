"""Processes are stopped for a while (SIGSTOP), and go on: the master, agents, workers, the fork server.

Nobody is lost where most fall silent together, and the losses are those of one process.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.examples import seeds

from .elastic import ENDLESS, TOLERANCE, Reference, assert_all_is_right, stopped
from .harness import SHORT_LEASE, Runner, Up, send_signal

STALLS_S = (2.8, 5.0)
SHORTEST_S, LONGEST_S = 0.1, 60.0
KINDS = (
    "the master",
    "the fork server",
    "all agents",
    "all workers",
    "all nodes",
    "an agent",
    "a worker",
    "a node",
)
NUM_NODES = 4
SAVED = ("--set", "checkpoint.enabled=true", "--set", "checkpoint.save_steps=4")
PATIENT = ("--set", "control.orphan_timeout_s=600", *SHORT_LEASE)
"""As by default; other runs here have less, so that nothing outlives a test for long."""


def agents_of(runner: Runner) -> list[int]:
    return [pid for node in range(NUM_NODES) for pid in runner.pids(f"node{node}", "agent")]


@contextmanager
def stalled(pids: Sequence[int]) -> Iterator[None]:
    """Stops processes, and lets them go on in the end; some may have ended by then."""
    _send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(pids, signal.SIGCONT)


def stall(pids: Sequence[int], seconds: float) -> None:
    with stalled(pids):
        time.sleep(seconds)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        send_signal(pid, number)


def losses_of_nodes(runner: Runner) -> list[dict[str, Any]]:
    return [entry for entry in runner.journal() if entry["@type"] == "NodeLost"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_masters_and_agents_that_are_stopped_for_seconds_lose_nobody(
    runner: Runner, endless_reference: Reference, start: Callable[..., Any]
) -> None:
    with start(*SHORT_LEASE) as run:
        for seconds in STALLS_S:
            stall([run.up.process.pid], seconds)
            run.up.wait_for_steps(5)
        stall(agents_of(runner), 5.0)
        run.up.wait_for_steps(5)
        assert losses_of_nodes(runner) == []
        run.stop()
    assert run.outcome.recoveries == []


@pytest.mark.slow
def test_a_master_that_is_stopped_while_it_starts_begins_all_the_same(
    runner: Runner, endless_reference: Reference
) -> None:
    with runner.up("--job", str(runner.job_file()), "--steps", str(ENDLESS), *SHORT_LEASE) as up:
        up.wait_for("starts on")
        stall([up.process.pid], 12.0)  # longer than any handshake may take
        up.wait_for_step(5)
        assert_all_is_right(stopped(runner, up), endless_reference)
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
                stall([pid for node in range(NUM_NODES) for pid in runner.pids(f"node{node}", "worker*")], 60.0)
        run.up.wait_for_steps(5)
        assert losses_of_nodes(runner) == []
        run.stop()


class Stalls:
    """Stops one or another of a run's processes, for a while that is drawn from a seed, and kills some meanwhile."""

    def __init__(self, runner: Runner, up: Up, seed: int) -> None:
        self.runner = runner
        self.up = up
        self.random = random.Random(seed)
        self.done: list[str] = []

    def strike(self) -> None:
        """Stop some, often others in the middle of it, and often kill a worker then, or the fork server."""
        first, seconds = self._draw()
        self.done.append(f"{first} for {seconds:.2f} s")
        with stalled(self._pids(first)):
            time.sleep(seconds / 2)
            if first == "the fork server":  # which is missed by those alone who want a worker of it
                self._kill("a worker")
            elif self.random.random() < 0.3:
                self._kill(self.random.choice(("a worker", "the fork server")))
            if self.random.random() < 0.3:
                second, _ = self._draw()
                self.done[-1] += f", {second} from its middle on"
                with stalled(self._pids(second)):
                    time.sleep(seconds / 4)
            time.sleep(seconds / 4)

    def _draw(self) -> tuple[str, float]:
        """Who, and for how long; a stall is as often between 0.1 and 1 s as it is between 1 and 10 s."""
        return self.random.choice(KINDS), SHORTEST_S * (LONGEST_S / SHORTEST_S) ** self.random.random()

    def _kill(self, kind: str) -> None:
        self.done[-1] += f", {kind} killed"
        if kind == "the fork server":
            self.runner.kill_fork_server()
        else:
            _send(self._pids(kind), signal.SIGKILL)

    def _pids(self, kind: str) -> list[int]:
        nodes = [f"node{node}" for node in range(NUM_NODES)]
        one = [self.random.choice(nodes)]
        match kind:
            case "the master":
                return [self.up.process.pid]
            case "the fork server":
                return self.runner.fork_servers()
            case "all agents" | "an agent":
                processes = "agent"
            case "all workers" | "a worker":
                processes = "worker*"
            case _:
                processes = "*"
        chosen = nodes if kind.startswith("all") else one
        return [pid for node in chosen for pid in self.runner.pids(node, processes)]


def ride_out(runner: Runner, reference: Reference, *, seed: int, stalls: int) -> None:
    """Let so many stalls strike a run; it must not end, and its losses must be those of one process.

    It saves, for what is killed beside a node that is given up may be the last copy of a layer.
    """
    options = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--resume", "never", *SAVED, *PATIENT)
    with runner.up(*options, "--set", "control.rejoin_after_s=2", nodes=("--local", str(NUM_NODES))) as up:
        up.wait_for_step(5)
        storm = Stalls(runner, up, seed)
        for _ in range(stalls):
            storm.strike()
            up.wait_for("] step ")
            up.wait_for_steps(storm.random.randint(2, 20))
        outcome = stopped(runner, up)
    story = f"seed {seed}: {storm.done}\n{outcome.output}"
    assert outcome.exit_code == 0, story
    assert (outcome.summary["samples_repeated"], outcome.summary["samples_missing"]) == (0, 0), story
    expected = reference(len(outcome.losses))
    gaps = [abs(one - other) for one, other in zip(outcome.losses, expected, strict=True)]
    assert max(gaps) < TOLERANCE, f"step {gaps.index(max(gaps)) + 1} differs by {max(gaps)}; {story}"
    assert runner.left_over() == [], story


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", seeds(3))
def test_a_storm_of_stalls_ends_no_run(runner: Runner, endless_reference: Reference, seed: int) -> None:
    ride_out(runner, endless_reference, seed=seed, stalls=8)
