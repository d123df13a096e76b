"""`oobleck verify`: reads what the user asks for, has it trained both ways, and prints the comparison."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oobleck.cli.common_options import JsonOption
from oobleck.cli.inputs import JobOptions, JobSource, read_job, whole
from oobleck.cli.option_fields import argument, option, takes_options
from oobleck.errors import ExitCode, UsageError, UserError
from oobleck.job import MAX_STEPS, JobSpec

if TYPE_CHECKING:
    from .both_ways import Asked

_MOST_NODES = 16


@dataclass(frozen=True, kw_only=True)
class _Job(JobOptions):
    settings: list[str] | None = option("--set", "KEY=VALUE", "Override a key of the job, for the run on nodes.")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    words: list[str] | None = argument(
        "[SCRIPT.py] [-- ARGUMENTS]",
        "A script that defines the job, or calls train() of a Trainer; and its own arguments.",
    )
    job: _Job = _Job()
    steps: int = option("--steps", "N", "Compare the first N steps.", default=8, parser=whole(1, MAX_STEPS))
    local: int = option("--local", "N", "Virtual nodes to train on.", default=4, parser=whole(2, _MOST_NODES))
    dtype: str | None = option(
        "--dtype", "Train in another precision both ways; float64 shows the smallest differences."
    )
    as_json: JsonOption = False


@takes_options(VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Train a job's first steps on virtual nodes of this machine and by the script itself, and compare all numbers.

    It kills a node on the way, and leaves the script's own outputs untouched. The exit status is 0 if all is equal, 3
    if anything differs, 78 if the job is refused.
    """
    script, *arguments = options.words or [""]
    if script and not script.endswith(".py"):
        raise UsageError(f"{script}: a script's name ends in .py; a job file is named by --job")
    source = JobSource(
        file=options.job.job_file,
        script=Path(script) if script else None,
        arguments=tuple(arguments),
        settings=options.job.settings or (),
    )
    raise SystemExit(_verified(source, options))


def verify_first(source: JobSource, *, steps: int) -> None:
    """Verify a job before it runs. Raises SystemExit unless it trains as the script does by itself."""
    code = _verified(source, VerifyOptions(steps=steps), to_stderr=True)
    if code != ExitCode.DONE:
        typer.echo("oobleck: --verify: training was not shown to match the script by itself; not started", err=True)
        raise SystemExit(code)


def _verified(source: JobSource, options: VerifyOptions, *, to_stderr: bool = False) -> int:
    from .both_ways import train_both_ways
    from .report import as_text, refused_json, to_json

    # The script runs below for the first time, and may then make its output directory.
    began_s = time.time()
    try:
        asked = _asked(read_job(source, num_nodes=options.local), source, options, began_s)
    except UserError as error:
        if options.as_json:
            typer.echo(refused_json(str(error)))
        raise
    outcome = train_both_ways(asked, tell=lambda text: typer.echo(f"oobleck verify: {text}", err=True))
    if options.as_json:
        typer.echo(to_json(asked, outcome))
    else:
        typer.echo(as_text(asked, outcome), err=to_stderr)
    return outcome.exit_code


def _asked(job: JobSpec, source: JobSource, options: VerifyOptions, began_s: float) -> Asked:
    from .both_ways import Asked, is_of_trainer

    num_steps, dtype = min(options.steps, job.max_steps), options.dtype
    if dtype is not None:
        if dtype not in ("float32", "float64", "bfloat16", "float16"):
            raise UsageError(f"--dtype: {dtype} is not known; it is one of float32, float64, bfloat16, float16")
        if is_of_trainer(job) and dtype not in ("float64", job.dtype):
            raise UsageError(f"--dtype: the Trainer itself chooses {job.dtype}; the only other choice is float64")
        if is_of_trainer(job) and job.dtype not in ("float32", "float64"):
            raise UsageError(f"--dtype: the script trains in {job.dtype}; leave its bf16 and fp16 out")
        job = replace(job, dtype=dtype)  # type: ignore[arg-type]  # checked just above
    if not is_of_trainer(job):
        job = replace(job, max_steps=num_steps)  # both follow the schedule of this many steps
    return Asked(
        job=replace(job, dropout=False),
        source=source,
        num_steps=num_steps,
        num_nodes=options.local,
        began_s=began_s,
    )
