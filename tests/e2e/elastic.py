"""A run that goes on until everything has happened to it that should, and is right in the end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from oobleck.cli.inputs.job_file import load_job
from oobleck.cli.main import main
from oobleck.errors import ExitCode

from .harness import TAG, Outcome, Runner, Up, oobleck
from .reference import each_reference_loss

TOLERANCE = 1e-9
LLAMA_TOLERANCE = 1e-5
"""transformers' Llama takes its norms in float32, whatever the job's dtype: now and then sums in another order round to
another number there, and within 200 steps losses are up to 4e-7 apart."""
ENDLESS = 5000
"""Steps that no run here makes; each is stopped before."""
MAX_COMPARED = 100
"""Losses of one run, for one process is slower than several."""

PACED = str(Path(__file__).with_name("paced_job.py"))
"""A script that goes with the harness's job files, and changes nothing but how long steps take."""

INTERVAL_S, LEASE_S = 0.25, 2.0
SHORT_LEASE = ("--set", f"control.heartbeat_interval_s={INTERVAL_S}", "--set", f"control.lease_s={LEASE_S}")
SLACK_S = 0.5
"""What two busy cores may add to a time that is bounded by a timer."""

Reference = Callable[[int], list[float]]


class Elastic:
    """A run under way, what can be done to it, and how it must have ended."""

    def __init__(self, runner: Runner, up: Up) -> None:
        self.up = up
        self._runner = runner
        self.outcome: Outcome | None = None

    def command(self, *words: str) -> None:
        exit_code, out, err = self._give(*words)
        assert exit_code == 0, out + err

    def refused(self, *words: str) -> str:
        """What a command says that cannot be carried out."""
        exit_code, out, err = self._give(*words)
        assert exit_code == 2, (exit_code, err)
        assert out == ""
        return err

    def _give(self, *words: str) -> tuple[int, str, str]:
        """Within this process, for each that is started takes a second to begin: exit code, output, errors."""
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            exit_code = main([*words, "--tag", TAG, "--base-dir", str(self._runner.base_dir)])
        return exit_code, out.getvalue(), err.getvalue()

    def wait_for_recovery(self, *nodes: str) -> None:
        """Read output until the loss of these nodes has been recovered from."""
        while not {node for _, _, lost in recoveries_in(self._runner.journal()) for node in lost}.issuperset(nodes):
            self.up.wait_for("] step ")

    def stop(self) -> Outcome:
        self.outcome = stopped(self._runner, self.up)
        return self.outcome


@contextmanager
def elastic_run(
    runner: Runner,
    reference: Reference,
    *options: str,
    nodes: Sequence[str] = ("--local", "4"),
    within: Sequence[str] = (),
    loses_steps: bool | None = False,
) -> Iterator[Elastic]:
    """Start a run, by the command `within` if there is one.

    When the test has ended it, all that it computed must be right, and nothing be left. Where it `loses_steps`, some
    are to be run again; None where that is a matter of when something struck.
    """
    given = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), *options)
    with runner.up(*given, nodes=(*nodes, PACED), within=within) as up:
        run = Elastic(runner, up)
        up.wait_for_step(5)
        yield run
    assert run.outcome is not None, "the test must end the run"
    assert_all_is_right(run.outcome, reference, loses_steps=loses_steps)
    assert runner.left_over() == []


def run_with_a_kill(runner: Runner, *options: str, kill: str) -> Outcome:
    """Run a job without end that loses a node (`node@step`), and stop it some steps after it has recovered.

    A run of few steps may be over before a busy master hears of the step to kill at, and then nobody is lost.
    """
    node = kill.partition("@")[0]
    with runner.up(*options, "--steps", str(ENDLESS), "--kill", kill) as up:
        up.wait_for_loss(node)
        up.wait_for_steps(6)
        outcome = stopped(runner, up)
    assert [recovery["nodes"] for recovery in outcome.recoveries] == [[node]]
    assert_nothing_lost(outcome, len(outcome.losses))
    return outcome


def run_without_a_kill(runner: Runner, *options: str, steps: int) -> Outcome:
    """Run the same job undisturbed, for at least so many steps."""
    with runner.up(*options, "--steps", str(ENDLESS)) as up:
        up.wait_for_step(steps)
        outcome = stopped(runner, up)
    assert_nothing_lost(outcome, len(outcome.losses))
    return outcome


def stopped(runner: Runner, up: Up) -> Outcome:
    done = oobleck("stop", TAG, "--base-dir", str(runner.base_dir))
    assert done.returncode == 0, done.stderr
    return up.finish()


def assert_nothing_lost(outcome: Outcome, steps: int) -> None:
    assert outcome.exit_code == 0, outcome.output
    summary = outcome.summary
    assert summary["steps_committed"] == steps
    assert (summary["steps_lost"], summary["samples_repeated"], summary["samples_missing"]) == (0, 0, 0)


def assert_cost_its_lease(recovery: dict[str, Any]) -> None:
    """Of a run with the short lease."""
    assert LEASE_S <= recovery["detect_s"] <= LEASE_S + SLACK_S
    assert LEASE_S - INTERVAL_S <= recovery["stall_s"] <= LEASE_S + 0.5 + SLACK_S


def freeze(runner: Runner, node: str) -> None:
    """Have a node's agent and worker do nothing any more, while their connections stay open."""
    for processes in ("agent", "worker0"):
        runner.signal(node, processes, signal.SIGSTOP)


def lost_nodes(outcome: Outcome) -> list[str]:
    """The nodes that recoveries were about, sorted; on a busy machine they are back before the run ends."""
    recoveries = [recovery for recovery in outcome.recoveries if recovery["cause"] != "joined"]
    return sorted(node for recovery in recoveries for node in recovery["nodes"])


def each_loss(job_file: Path, cache_dir: Path, *, evaluations: list[float] | None = None) -> Reference:
    """The first losses of a job in one process; as many as are asked for, each computed once.

    `evaluations` receives the losses of evaluations up to there.
    """
    job = replace(load_job(job_file.read_text(), source=str(job_file)), max_steps=ENDLESS)
    coming = each_reference_loss(job, cache_dir, evaluations=evaluations)
    known: list[float] = []

    def first(count: int) -> list[float]:
        known.extend(islice(coming, max(0, count - len(known))))
        return known[:count]

    return first


def assert_all_is_right(
    outcome: Outcome, reference: Reference, *, loses_steps: bool | None = False, tolerance: float = TOLERANCE
) -> None:
    assert outcome.exit_code == 0, outcome.output
    summary = outcome.summary
    assert summary["exit_code"] == ExitCode.DONE
    assert (summary["samples_repeated"], summary["samples_missing"]) == (0, 0)
    assert loses_steps in (None, summary["steps_lost"] > 0)
    assert len(outcome.losses) == summary["steps_committed"] < ENDLESS
    assert_losses(outcome.losses, reference, tolerance=tolerance)


def assert_losses(losses: list[float], reference: Reference, *, tolerance: float = TOLERANCE) -> None:
    """Compare with the losses of one process, as many as it computes in some seconds."""
    expected = reference(min(len(losses), MAX_COMPARED))
    assert max(abs(one - other) for one, other in zip(losses, expected, strict=False)) < tolerance


def recoveries(outcome: Outcome) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(each["cause"], each["action"], tuple(each["nodes"])) for each in outcome.recoveries]


def recoveries_in(journal: Sequence[dict[str, Any]]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Cause, action and nodes of each recovery that a journal tells of."""
    done = [entry for entry in journal if entry["@type"] == "RecoveryDone"]
    return [(each["loss"] or each["cause"], each["action"], tuple(each["nodes"])) for each in done]


def nodes_of(outcome: Outcome) -> list[str]:
    """The nodes that train under the last plan."""
    plan = outcome.summary["plan"]
    return sorted({stage["node"] for pipeline in plan["pipelines"] for stage in pipeline["stages"]})
