"""`oobleck up`: reads and checks what the user asks for before anything starts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import threading
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oobleck.cli import inputs
from oobleck.cli.common_options import base_dir_of
from oobleck.cli.option_fields import takes_options
from oobleck.errors import ConfigError, ResourceLost, UsageError
from oobleck.host.script import SCRIPT_WAITS
from oobleck.host.user_path import expand_user
from oobleck.job import JobSpec
from oobleck.runtime.files import LAUNCHED_DIRECTORY, default_tag

from .detached import is_detached, start_detached
from .options import UpOptions

if TYPE_CHECKING:
    from oobleck.runtime.metrics_output import MetricsAddress
    from oobleck.runtime.processes import TrainerProcess
    from oobleck.runtime.workdir import Workdir

_STEP = re.compile(r"[0-9]{1,15}")
_JOB_FILES = (".yaml", ".yml")


@takes_options(UpOptions)
def up(options: UpOptions) -> None:
    """Train a job on the nodes of a hostfile or of a command that prints one, or on virtual nodes of this machine.

    Training continues when nodes are lost. Ctrl-C once finishes the step and stops; twice stops at once.
    """
    if is_detached():
        options = replace(options, plain=True)  # a file shows no dashboard
    elif options.detach and not options.dry:
        raise SystemExit(start_detached(base_dir_of(options.base_dir)))
    hostfile, asked = _parse_words(options)
    workdir = _workdir(options, asked)
    if workdir is not None:
        asked = replace(asked, environment={**asked.environment, **workdir.variables})
    source = inputs.read_source(hostfile, options.nodes)
    if options.summary is not None:
        _check_summary(options.summary)
    if options.verify is not None:
        if options.dry:
            raise UsageError("--verify: a dry run compares nothing; use `oobleck verify`, or leave --dry-run out")
        from oobleck.cli.verify import verify_first

        verify_first(asked, steps=options.verify)
    job, trainer = _open(options, asked, source)
    resume = _resume(options, trainer, workdir)
    job, owner = _named(options, asked, options.scaled(job))
    _check_nodes(options, job, len(source.names))
    metrics = _metrics_address(options)
    config = options.reach.read_config()
    kills = _parse_kills(options, source, job)
    if options.dry:
        if options.summary is not None:
            raise UsageError("--summary: a dry run has none; leave it out, or use --json for the plan as JSON")
        from oobleck.cli.dry_run import dry_run

        dry_run(job, source, base_dir=base_dir_of(options.base_dir), as_json=options.as_json)
        return
    # Under --workdir, virtual nodes look for relative paths there.
    if options.nodes.local is not None and workdir is None:
        inputs.check_local_files(job.data, job.checkpoint)
    _check_weights(options, job, trainer)
    _check_trackers(job, trainer)
    _check_answers(job, trainer)
    if options.until_eof:
        end_with_stdin()
    from .run_job import Run, run_job

    run = Run(
        options=options,
        job=job,
        source=source,
        kills=kills,
        ssh_config=config,
        resume=resume,
        metrics=metrics,
        trainer=trainer,
        workdir=workdir,
        arguments=asked.arguments,
        owner=owner,
    )
    raise SystemExit(run_job(run))


def _check_summary(path: Path) -> None:
    place = expand_user(path)
    if place.is_dir():
        raise UsageError(f"--summary: {path} is a directory; name a file")
    if not os.access(place.parent, os.W_OK):
        raise UsageError(f"--summary: {path} cannot be written; its directory must exist and be yours")


def _resume(options: UpOptions, trainer: TrainerProcess | None, workdir: Workdir | None) -> str:
    """Return what the command or the script's `train()` resumes from. Raises ConfigError if virtual nodes lack it."""
    resume, named = options.resume, "--resume"
    if trainer is not None and trainer.resume and resume == "auto":
        resume = trainer.resume if isinstance(trainer.resume, str) else "newest"
        named = "train(resume_from_checkpoint=…)"
    # Under --workdir, virtual nodes look for relative paths there.
    if options.nodes.local is not None and workdir is None:
        inputs.check_resume(resume, named)
    return resume


def _metrics_address(options: UpOptions) -> MetricsAddress | None:
    if options.metrics is None:
        return None
    from oobleck.runtime.metrics_output import parse_metrics_address

    return parse_metrics_address(options.metrics)


def _workdir(options: UpOptions, asked: inputs.JobSource) -> Workdir | None:
    """Return the directory that travels to nodes; they, and scripts here, import from it and from a script's in it."""
    if (named := options.environment.workdir) is None:
        return None
    path = inputs.read_workdir(named)
    script = None if asked.script is None else expand_user(asked.script).resolve().parent
    is_inside = script is not None and script != path and script.is_relative_to(path)
    imports = (".", str(script.relative_to(path))) if script is not None and is_inside else (".",)
    from oobleck.runtime.workdir import Workdir, pack

    before = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*(str(path / name) for name in imports), *before])
    return Workdir(path=path, import_from=imports) if options.nodes.local is not None else pack(path, imports)


def _open(
    options: UpOptions, asked: inputs.JobSource, source: inputs.NodeSource
) -> tuple[JobSpec, TrainerProcess | None]:
    num_nodes = len(source.names)
    if options.dry:
        return options.applied_to(inputs.read_job(asked, num_nodes=num_nodes)), None
    are_virtual = options.nodes.local is not None
    return inputs.open_job(asked, num_nodes=num_nodes, finish=options.applied_to, are_virtual=are_virtual)


def _check_weights(options: UpOptions, job: JobSpec, trainer: TrainerProcess | None) -> None:
    """Raise ConfigError for a model that cannot be cut as asked; warn a script that will not find the weights."""
    if job.tensor_parallel > 1 or job.schedule == "interleaved":
        _check_model(job)
    if trainer is not None and options.nodes.local is None and job.checkpoint.directory is None:
        typer.echo(
            "oobleck: the script needs the trained weights on this machine, and nodes save to their own "
            "~/.oobleck; unless that is shared, set checkpoint.directory to a directory that is",
            err=True,
        )


def _check_trackers(job: JobSpec, trainer: TrainerProcess | None) -> None:
    """Raise ConfigError for trackers that are not installed here, where they are called."""
    if job.report_to and trainer is not None:
        raise ConfigError("report_to: the script's Trainer reports; name it in its TrainingArguments instead")
    missing = [name for name in job.report_to if find_spec(name) is None]
    if missing:
        packages = " ".join(name.replace("_", "-") for name in missing)
        raise ConfigError(f"report_to: not installed on this machine: {', '.join(missing)}; pip install {packages}")


def _check_answers(job: JobSpec, trainer: TrainerProcess | None) -> None:
    """Raise ConfigError for a job whose steps would wait for a script that never answers."""
    if job.control.waits_for_script and (job.data.shards or (trainer is None and SCRIPT_WAITS not in os.environ)):
        raise ConfigError("control.waits_for_script: only the script of a Trainer answers; leave it out")


def _check_model(job: JobSpec) -> None:
    """Raise ConfigError for a model that devices cannot share, or that has too few layers for its chunks."""
    from oobleck.control.training import check_possible
    from oobleck.runtime.processes import outline_of

    try:
        outline = outline_of(job)
    except ConfigError as error:
        if str(error).startswith("tensor_parallel"):
            raise
    except ResourceLost:
        # This machine has no torch, or only nodes have the model. They check it too.
        pass
    else:
        check_possible(job, num_layers=len(outline.layers))


def _named(options: UpOptions, asked: inputs.JobSource, job: JobSpec) -> tuple[JobSpec, str]:
    """Return the job under a tag that no other job's run has, and the run's owner: the path of a script or job file."""
    path, base_dir = asked.script or asked.file, base_dir_of(options.base_dir)
    owner = "the default job" if path is None else os.path.abspath(expand_user(path))
    # A program has made this file for this run, so it belongs to no user.
    if path is not None and Path(owner).is_relative_to(base_dir.resolve() / LAUNCHED_DIRECTORY):
        return job, ""
    is_default = job.tag in (JobSpec().tag, asked.script.stem if asked.script is not None else None)
    if options.tag is None and is_default and (own := default_tag(base_dir, job.tag, owner)) != job.tag:
        typer.echo(f"oobleck: another job's run is called {job.tag}; this one is {own} (--tag names it)", err=True)
        job = replace(job, tag=own)
    return job, owner


def _check_nodes(options: UpOptions, job: JobSpec, num_nodes: int) -> None:
    """Raise UserError for too few nodes, or for options that do not apply to these nodes."""
    if job.num_pipelines is not None and job.num_pipelines > num_nodes:
        raise (ConfigError if options.num_pipelines is None else UsageError)(
            f"num_pipelines: {job.num_pipelines} pipelines are asked for, and there are {num_nodes} nodes; "
            "each pipeline needs at least one node"
        )
    if job.fault_threshold >= num_nodes and job.fault_threshold > 1:
        typer.echo(
            f"oobleck: fault_threshold is {job.fault_threshold}, and there are {num_nodes} nodes: "
            f"at most {num_nodes - 1} of them can be lost at once",
            err=True,
        )
    is_local = options.nodes.local is not None
    if options.reach.ssh_config is not None and is_local:
        raise UsageError("--ssh-config: virtual nodes need none; leave it out, or name a hostfile instead of --local")
    python = options.reach.python
    # Virtual nodes are this machine. Whether another node has an interpreter, only that node knows.
    is_missing = python and is_local and shutil.which(os.path.expanduser(python)) is None
    if python is not None and (not python or "\0" in python or is_missing):
        raise UsageError(f"--python: there is no {python or 'interpreter without a name'}; name one that can be run")


def _parse_words(options: UpOptions) -> tuple[Path | None, inputs.JobSource]:
    """Tell a hostfile, a script and the script's arguments apart: a script's name ends in .py."""
    words = options.words or []
    for word in words[:2]:
        if word.endswith(_JOB_FILES) and options.job.job_file is None:
            raise UsageError(f"{word}: a job file is named by an option: --job {word}")
    scripts = [index for index, word in enumerate(words[:2]) if word.endswith(".py")]
    end = scripts[0] if scripts else len(words)
    if end > 1:
        raise UsageError(f"{words[1]}: only a script, whose name ends in .py, may follow the hostfile")
    return Path(words[0]) if end else None, inputs.JobSource(
        file=options.job.job_file,
        script=Path(words[end]) if scripts else None,
        arguments=tuple(words[end + 1 :]),
        settings=options.job.settings or (),
        environment=options.environment.variables(),
    )


def _parse_kills(options: UpOptions, source: inputs.NodeSource, job: JobSpec) -> tuple[tuple[str, int], ...]:
    # Nodes that dial in have names of their own, which are not known yet.
    known = None if isinstance(source, inputs.DialIn) else source.names
    return tuple(_parse_kill(text, known, job.max_steps) for text in options.kill or [])


def _parse_kill(text: str, nodes: tuple[str, ...] | None, max_steps: int) -> tuple[str, int]:
    """Read NODE@STEP; `nodes` is None while the nodes are not known."""
    node, at, step = text.rpartition("@")
    if not at or not _STEP.fullmatch(step):
        raise UsageError(f"--kill: {text!r} is not NODE@STEP, as in {nodes[-1] if nodes else 'node2'}@20")
    if nodes is not None and node not in nodes:
        raise UsageError(f"--kill: there is no node {node!r}; the nodes are {', '.join(nodes)}")
    if not 1 <= int(step) < max_steps:
        raise UsageError(f"--kill: step {step} is not between 1 and {max_steps - 1}, the last but one")
    return node, int(step)


def end_with_stdin() -> None:
    """Send this process a SIGTERM once its standard input ends, if that is a pipe. Call it in the main thread."""
    with suppress(OSError):
        # A master that was restarted (as by `oobleck chaos`) has no pipe, and belongs to no program.
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            # A shell makes background programs ignore SIGINT, and their children inherit that. It stops this one.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Thread(target=_wait_and_end, name="lifeline", daemon=True).start()


def _wait_and_end() -> None:
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
