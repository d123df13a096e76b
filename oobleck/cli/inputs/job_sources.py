"""Reads a job from where it is defined: the default, a file, a script, or both, with `--set` on top."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oobleck.errors import ConfigError, ResourceLost, UnbuiltModel
from oobleck.host.places import is_url, may_be_of_hub, place_of
from oobleck.host.script import SCRIPT_WAITS, has_job
from oobleck.host.user_path import expand_user
from oobleck.job import CheckpointSpec, DataSpec, JobSpec
from oobleck.job.bounds import require
from oobleck.runtime.files import read_input

from .environment import apply_environment
from .job_file import apply_overrides, default_job, load_job

if TYPE_CHECKING:
    from oobleck.runtime.processes import DescribedScript, ScriptProcess, TrainerProcess

# These parts of a script's job are tried before anything starts.
_TRIED = frozenset({"model", "loss", "optimizer", "lr_lambda"})


@dataclass(frozen=True, kw_only=True)
class JobSource:
    """The job of a command line; without a file and a script it is the default job."""

    file: Path | None = None
    script: Path | None = None
    arguments: tuple[str, ...] = ()
    settings: Sequence[str] = ()
    """KEY=VALUE; these override all else."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the run, which override the job's `env`."""


def read_job(source: JobSource, *, num_nodes: int) -> JobSpec:
    """Read a job; its script overrides its file. A script takes as long as its imports."""
    base = _base(source, num_nodes=num_nodes)
    described = None
    if source.script is not None:
        from oobleck.runtime.processes import describe_script

        described = describe_script(source.script, source.arguments)
    return _read(source, described, base)


def open_job(
    source: JobSource, *, num_nodes: int, finish: Callable[[JobSpec], JobSpec], are_virtual: bool
) -> tuple[JobSpec, TrainerProcess | None]:
    """Read a job for a run, and apply `finish`. A script that calls `train()` then runs, and waits in that call.

    The model, loss and optimizer of any other script are tried first, as nodes would. If only nodes can try them, a
    note on stderr says so. Raises SystemExit if a script exits before its `train()`.
    """
    if source.script is None:
        return finish(read_job(source, num_nodes=num_nodes)), None
    from oobleck.runtime.processes import ScriptProcess, TrainerProcess, read_script

    base = _base(source, num_nodes=num_nodes)
    spec = read_script(source.script, source.arguments)
    # With SCRIPT_WAITS, a process of the script waits already, or the lines after its `train()` must not run.
    if not has_job(spec) and SCRIPT_WAITS not in os.environ:
        trainer = TrainerProcess(spec)
        job = finish(_read(source, trainer.described, base))
        trainer.check_for(job)
        return job, trainer
    with closing(ScriptProcess(source.script, source.arguments)) as process:
        job = finish(_read(source, process.described, base))
        if has_job(spec) and not _TRIED.isdisjoint(process.described.spec.provides):
            job = _tried_out(process, job, are_virtual=are_virtual)
    return job, None


def check_local_files(data: DataSpec, checkpoint: CheckpointSpec) -> None:
    """Raise ConfigError for files of a job's data that this machine, and so its virtual nodes, do not have.

    So does a URL of its checkpoints that they cannot read.
    """
    if checkpoint.enabled and checkpoint.directory is not None:
        place_of(checkpoint.directory, "checkpoint.directory")
    named = [("data.paths", path) for path in data.paths]
    # Only a node finds out what the hub has, or its cache.
    if data.tokenizer is not None and not may_be_of_hub(data.tokenizer):
        named.append(("data.tokenizer", data.tokenizer))
    for key, path in named:
        if not is_url(path) and not expand_user(path).exists():
            raise ConfigError(f"{key}: {path} does not exist on this machine")


def check_resume(resume: str, named: str) -> None:
    """Raise ConfigError that says `named` if there is no checkpoint at a path of `--resume` on this machine."""
    from oobleck.control.training import CONTINUING
    from oobleck.storage import CheckpointDirectory

    if resume in {*CONTINUING, "never"}:
        return
    path = place_of(resume, named)
    if not (beside := CheckpointDirectory(path.parent)).is_unfinished(path.name):
        found = tuple(entry for entry in beside.find() if entry.name == path.name)
    else:
        found = CheckpointDirectory(path).find()
    if not any(entry.manifest for entry in found):
        raise ConfigError(f"{named} {resume}: there is no checkpoint that can be used")


def _tried_out(process: ScriptProcess, job: JobSpec, *, are_virtual: bool) -> JobSpec:
    assert job.script is not None
    is_tried = True
    try:
        note = process.try_out(job)
    except (ConfigError, ResourceLost) as error:
        is_elsewhere = job.model.path is not None and not os.path.isdir(expand_user(job.model.path))
        is_for_nodes = not are_virtual and (isinstance(error, UnbuiltModel) or is_elsewhere)
        if isinstance(error, ConfigError) and not is_for_nodes:
            raise
        note, is_tried = f"{error}; nodes try model, loss and optimizer once they have started", False
    if note:
        typer.echo(f"oobleck: {note}", err=True)
    return replace(job, script=replace(job.script, is_tried=is_tried))


def _base(source: JobSource, *, num_nodes: int) -> JobSpec:
    """Return the job below the script's, whose variables its script may read."""
    if source.file is None and source.script is None:
        job = default_job(num_nodes)
    elif source.file is None:
        job = JobSpec()
    else:
        job = load_job(read_input(source.file, "job file"), source=str(source.file))
    apply_environment(job, source.environment)
    return job


def _read(source: JobSource, described: DescribedScript | None, job: JobSpec) -> JobSpec:
    if described is not None:
        job = load_job(described.settings, source=f"{source.script}, its job", base=job, has_lines=False)
        job = replace(job, script=described.spec)
    job = apply_environment(apply_overrides(job, source.settings), source.environment)
    if job.script is None:  # a script may bring samples of its own
        has_samples = job.data.validation_split > 0
        require(
            has_samples or job.eval_steps is None,
            "eval_steps",
            job.eval_steps,
            "left out unless data.validation_split, as 0.05, keeps samples for evaluation",
        )
    return job
