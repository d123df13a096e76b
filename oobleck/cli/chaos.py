"""`oobleck chaos`: plays a failure trace on real processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer

from oobleck.errors import UsageError
from oobleck.job import MAX_NODES, MAX_STEPS, JobSpec
from oobleck.runtime.control_client import find_run
from oobleck.runtime.files import RunDirectory
from oobleck.sim.trace import Trace

from .chaos_run import LocalRun, Player, RunningRun, name_nodes, not_played
from .common_options import BaseDirOption, TagOption, base_dir_of
from .inputs import NUM_SPARE_NODES, JobOptions, JobSource, read_job, whole
from .option_fields import argument, flag, option, takes_options
from .trace import read_trace

_LOCAL_TAG = "chaos"
_ENDLESS_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    trace_file: Path = argument("TRACE", "A failure trace; see `oobleck trace`.", default=...)
    local: int | None = option("--local", "N", "Play it on a new run of N virtual nodes.", parser=whole(1, MAX_NODES))
    tag: TagOption = None
    speedup: float = option("--speedup", "X", "Play it X times as fast.", default=1.0)
    job: JobOptions
    steps: int | None = option(
        "--steps",
        "N",
        "Steps of the new run; by default it continues to the trace's end.",
        parser=whole(1, MAX_STEPS),
    )
    plain: bool = flag("--plain", "Print lines instead of the dashboard.")
    summary: Path | None = option("--summary", "FILE", "Write the closing summary of the new run as JSON.")
    base_dir: BaseDirOption = None


@takes_options(ChaosOptions)
def chaos(options: ChaosOptions) -> None:
    """Play a failure trace on a run: kill, freeze, slow down and add its nodes, crash its master.

    It plays on an active run, or, with --local, on a new one on virtual nodes of this machine, which it stops at the
    trace's end. Times count from the first step, or from now if training is under way already.
    """
    speedup, local = options.speedup, options.local
    if not 0 < speedup <= 1e6:
        raise UsageError(f"--speedup: {speedup:g} is not possible; it must be above 0, and at most 1,000,000")
    trace = read_trace(options.trace_file)
    base = base_dir_of(options.base_dir)
    own = _options_of_the_run(options)
    if local is None:
        if own:
            raise UsageError("--job, --set, --steps, --plain and --summary belong to a new run; add --local N")
        running = RunningRun(find_run(base, options.tag))
        _play(trace, Player(running, name_nodes(trace, running.nodes), speedup=speedup, tell=_say), _say)
        return
    if options.steps is None:
        # The trace's end stops the run, not its last step.
        own += ["--steps", str(_ENDLESS_STEPS)]
    there = [f"node{index}" for index in range(local + NUM_SPARE_NODES)]
    names = name_nodes(trace, there[:local], there[local:])
    has_dashboard = sys.stdout.isatty() and not options.plain  # it lists the events itself
    tell = (lambda text: None) if has_dashboard else _say
    run = LocalRun(RunDirectory(base_dir=base, tag=options.tag or _tag_of(options.job)), ["--local", str(local), *own])
    with run.ended_with_us():
        if run.wait_for_training():
            _play(trace, Player(run, names, speedup=speedup, tell=tell), tell)
        raise SystemExit(run.stop())


def _options_of_the_run(options: ChaosOptions) -> list[str]:
    words = [f"--set={setting}" for setting in options.job.settings or []]
    for name, value in (("--job", options.job.job_file), ("--summary", options.summary), ("--steps", options.steps)):
        words += [] if value is None else [f"{name}={value}"]
    return [*words, "--plain"] if options.plain else words


def _tag_of(asked: JobOptions) -> str:
    """Return the tag of the new run's job, or our own if the job has only the default one."""
    job = read_job(JobSource(file=asked.job_file, settings=asked.settings or ()), num_nodes=1)
    return _LOCAL_TAG if job.tag == JobSpec().tag else job.tag


def _play(trace: Trace, player: Player, tell: Callable[[str], None]) -> None:
    if (words := not_played(trace)) is not None:
        tell(words)
    tell("the trace is over" if player.play(trace) else "the run has ended before the trace did")


def _say(text: str) -> None:
    typer.echo(f"chaos: {text}")
    sys.stdout.flush()
