"""A seeded storm of faults on real processes, beside a run that nothing disturbs.

Whatever happens, and in whatever order, every step is committed once, with the losses of the undisturbed run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import pytest

from oobleck.cli.job_file import load_job

from .harness import TAG, Runner, Up, oobleck, worker_pids
from .reference import reference_losses

TOLERANCE = 1e-9
LEASE_S = 1.5
NUM_NODES = 6
KEPT_SAFE = frozenset({"node0", "node1", "node2"})
"""Nobody harms these: with two pipelines, one copy of each layer always lives among three nodes of six or fewer."""


@dataclass
class Storm:
    """Does one fault after the other to a run, drawn from a seed; knows who is in the job."""

    runner: Runner
    seed: int
    start: Callable[[], Up]
    """Runs `oobleck up`, at first and once a master was killed."""
    living: set[str] = field(default_factory=lambda: {f"node{index}" for index in range(NUM_NODES)})
    done: list[str] = field(default_factory=list)
    _harmed: tuple[str, int] = ("", 0)
    """Who of those that are kept safe lost a worker last, and which process that was."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.up = self.start()

    def strike(self) -> None:
        """Do something that the members of the job allow."""
        candidates = sorted(self.living - KEPT_SAFE)
        away = sorted({f"node{index}" for index in range(NUM_NODES)} - self.living)
        acts = [self.kill_worker, self.kill_master]
        if away:
            acts += [self.add, self.add]
        if candidates:
            acts += [self.kill, self.kill_agent, self.freeze, self.freeze_a_while, self.drain, self.give_notice]
        if len(candidates) > 1:
            acts += [self.kill_two]
        self.random.choice(acts)()

    def kill(self) -> None:
        self._end([self.random.choice(sorted(self.living - KEPT_SAFE))], signal.SIGKILL)

    def kill_two(self) -> None:
        self._end(self.random.sample(sorted(self.living - KEPT_SAFE), 2), signal.SIGKILL)

    def freeze(self) -> None:
        self._end([self.random.choice(sorted(self.living - KEPT_SAFE))], signal.SIGSTOP)

    def freeze_a_while(self) -> None:
        """Shorter than the lease: nobody is to be lost for it."""
        node = self.random.choice(sorted(self.living - KEPT_SAFE))
        self.done.append(f"freeze {node} a while")
        self._signal(node, "*.pid", signal.SIGSTOP)
        time.sleep(LEASE_S / 3)
        self._signal(node, "*.pid", signal.SIGCONT)

    def kill_agent(self) -> None:
        node = self.random.choice(sorted(self.living - KEPT_SAFE))
        self.done.append(f"kill the agent of {node}")
        self._signal(node, "agent.pid", signal.SIGKILL)
        self.living.discard(node)

    def kill_master(self) -> None:
        """Its successor takes over what goes on."""
        self.done.append("kill the master")
        self.up.process.kill()
        self.up.process.wait()
        self.up = self.start()

    def give_notice(self) -> None:
        node = self.random.choice(sorted(self.living - KEPT_SAFE))
        self.done.append(f"SIGTERM {node}")
        self._signal(node, "agent.pid", signal.SIGTERM)
        self.living.discard(node)

    def kill_worker(self) -> None:
        """Of those that are kept safe, one at a time: a worker that is back holds nothing before it is in a plan."""
        node = self.random.choice(sorted(self.living))
        if node in KEPT_SAFE and not self._are_safe():
            self.done.append(f"spare the worker of {node}")
            return
        if node in KEPT_SAFE:
            self._harmed = (node, worker_pids(self.runner)[node])
        self.done.append(f"kill the worker of {node}")
        self._signal(node, "worker*.pid", signal.SIGKILL)

    def drain(self) -> None:
        node = self.random.choice(sorted(self.living - KEPT_SAFE))
        self._command("drain", node)
        self.living.discard(node)

    def add(self) -> None:
        node = self.random.choice(sorted({f"node{index}" for index in range(NUM_NODES)} - self.living))
        if self._command("add", node):
            self.living.add(node)

    def _are_safe(self) -> bool:
        """Whether steps are committed under a plan with all who are kept safe, or soon will be."""
        return any(self._commits_with_all() or time.sleep(0.1) for _ in range(50))

    def _commits_with_all(self) -> bool:
        """Looked for in the journal from its end: a step, a plan with all, and before it the worker that came back."""
        entries = self.runner.journal()
        plans = [index for index, entry in enumerate(entries) if entry["@type"] == "PlanAdopted"]
        if not plans or not any(entry["@type"] == "StepDone" for entry in entries[plans[-1] :]):
            return False
        pids = {entry["node"]: entry["pid"] for entry in entries[: plans[-1]] if entry["@type"] == "WorkerUp"}
        in_plan = {node for pipeline in entries[plans[-1]]["plan"]["pipelines"] for node in pipeline["nodes"]}
        return in_plan >= KEPT_SAFE and pids.get(self._harmed[0]) != self._harmed[1]

    def _end(self, nodes: list[str], number: signal.Signals) -> None:
        self.done.append(f"{number.name} {', '.join(nodes)}")
        for node in nodes:
            self._signal(node, "*.pid", number)
            self.living.discard(node)

    def _signal(self, node: str, pattern: str, number: signal.Signals) -> None:
        for path in self.runner.agent_directory(node).glob(pattern):
            with suppress(ProcessLookupError, FileNotFoundError, ValueError):
                os.kill(int(path.read_text()), number)

    def _command(self, command: str, node: str) -> bool:
        """A command that comes too early or too late is refused; that is an answer, too."""
        self.done.append(f"{command} {node}")
        return oobleck(command, node, "--tag", TAG, "--base-dir", str(self.runner.base_dir)).returncode == 0


def ride_out(runner: Runner, *, seed: int, faults: int, steps: int) -> None:
    path = runner.job_file()
    job = replace(load_job(path.read_text(), source=str(path)), max_steps=steps)
    control = ("--set", f"control.lease_s={LEASE_S}", "--set", "control.rejoin_after_s=4")
    with ExitStack() as runs:

        def start() -> Up:
            options = ("--job", str(path), "--steps", str(steps), *control)
            return runs.enter_context(runner.up(*options, nodes=("--local", str(NUM_NODES))))

        storm = Storm(runner, seed, start)
        for step in sorted(storm.random.sample(range(3, steps - 4), faults)):
            try:
                storm.up.wait_for_step(step)
            except AssertionError:  # lines about steps are thinned: a late run may be over before it tells of this one
                assert storm.up.process.wait() == 0, "".join(storm.up.output)
                break
            storm.strike()
        outcome = storm.up.finish()
    story = f"seed {seed}: {storm.done}\n{outcome.output}"
    assert outcome.exit_code == 0, story
    assert outcome.summary["steps_committed"] == steps, story
    assert (outcome.summary["samples_repeated"], outcome.summary["samples_missing"]) == (0, 0), story
    reference = reference_losses(job, runner.directory / "cache")
    gaps = [abs(one - other) for one, other in zip(outcome.losses, reference, strict=True)]
    assert max(gaps) < TOLERANCE, f"step {gaps.index(max(gaps)) + 1} differs by {max(gaps)}; {story}"
    assert runner.left_over() == [], story


def test_a_short_storm_changes_no_loss(runner: Runner) -> None:
    ride_out(runner, seed=1, faults=6, steps=60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_a_long_storm_changes_no_loss(runner: Runner, seed: int) -> None:
    ride_out(runner, seed=seed, faults=30, steps=300)
