"""`oobleck chaos`: a failure trace, played on real processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from oobleck.errors import UsageError
from oobleck.job import MAX_NODES, MAX_STEPS, JobSpec
from oobleck.runtime.control_client import find_run
from oobleck.runtime.files import RunDirectory
from oobleck.sim.trace import Trace

from .chaos_run import LocalRun, Player, RunningRun, name_nodes, not_played
from .common_options import BaseDirOption, TagOption, base_dir_of
from .inputs import NUM_SPARE_NODES, JobSource, read_job, whole
from .trace import read_trace

_LOCAL_TAG = "chaos"
_ENDLESS_STEPS = 1_000_000


def chaos(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="A failure trace; see `oobleck trace`.")],
    *,
    local: Annotated[
        int | None,
        typer.Option(
            "--local", metavar="N", parser=whole(1, MAX_NODES), help="Play it on a new run of N virtual nodes."
        ),
    ] = None,
    tag: TagOption = None,
    speedup: Annotated[float, typer.Option("--speedup", metavar="X", help="Play it X times as fast.")] = 1.0,
    job_file: Annotated[Path | None, typer.Option("--job", metavar="FILE", help="Job of the new run.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of its job.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            parser=whole(1, MAX_STEPS),
            help="Its steps. By default the run continues to the trace's end.",
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the dashboard.")] = False,
    summary: Annotated[
        Path | None, typer.Option("--summary", metavar="FILE", help="Write its closing summary as JSON.")
    ] = None,
    base_dir: BaseDirOption = None,
) -> None:
    """Play a failure trace on a run: kill, freeze, slow down and add its nodes, crash its master.

    On a run that is active, or, with --local, on a new one on virtual nodes of this machine, which is stopped at the
    trace's end. Times count from the first step, or from now if training is under way already.
    """
    if not 0 < speedup <= 1e6:
        raise UsageError(f"--speedup: {speedup:g} is not possible; it must be above 0, and at most 1,000,000")
    trace = read_trace(trace_file)
    base = base_dir_of(base_dir)
    if local is None:
        if job_file is not None or settings or steps is not None or plain or summary is not None:
            raise UsageError("--job, --set, --steps, --plain and --summary are of a new run; name one with --local N")
        _play_on_running(trace, RunningRun(find_run(base, tag)), speedup)
        return
    options = ["--local", str(local), "--steps", str(_ENDLESS_STEPS if steps is None else steps)]
    for name, values in (("--job", [job_file]), ("--set", settings or []), ("--summary", [summary])):
        options += [word for value in values if value is not None for word in (name, str(value))]
    if plain:
        options.append("--plain")
    there = [f"node{index}" for index in range(local + NUM_SPARE_NODES)]
    names = name_nodes(trace, there[:local], there[local:])
    tell = _keep_quiet if sys.stdout.isatty() and not plain else _say
    run = LocalRun(RunDirectory(base_dir=base, tag=tag or _tag_of(job_file, settings or [])), options)
    with run.ended_with_us():
        if run.wait_for_training():
            _play(trace, Player(run, names, speedup=speedup, tell=tell), tell)
        raise SystemExit(run.stop())


def _tag_of(job_file: Path | None, settings: Sequence[str]) -> str:
    """The tag that the new run's job asks for; one of our own where it is none of its own."""
    job = read_job(JobSource(file=job_file, settings=settings), num_nodes=1)
    return _LOCAL_TAG if job.tag == JobSpec().tag else job.tag


def _play_on_running(trace: Trace, run: RunningRun, speedup: float) -> None:
    _play(trace, Player(run, name_nodes(trace, run.nodes), speedup=speedup, tell=_say), _say)


def _play(trace: Trace, player: Player, tell: Callable[[str], None]) -> None:
    if (words := not_played(trace)) is not None:
        tell(words)
    tell("the trace is over" if player.play(trace) else "the run has ended before the trace did")


def _say(text: str) -> None:
    typer.echo(f"chaos: {text}")
    sys.stdout.flush()


def _keep_quiet(_text: str) -> None:
    """The dashboard has the terminal; it shows what happens among the run's events."""
