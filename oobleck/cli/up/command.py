"""`oobleck up`: what the user asked for, read and checked before anything is started."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args, get_type_hints

import typer

from oobleck.cli import inputs
from oobleck.cli.common_options import BaseDirOption, JsonOption, base_dir_of
from oobleck.errors import ConfigError, ResourceLost, UsageError
from oobleck.host.user_path import expand_user
from oobleck.job import JobSpec
from oobleck.runtime.files import LAUNCHED_DIRECTORY, default_tag, read_input

if TYPE_CHECKING:
    from oobleck.runtime.metrics_output import MetricsAddress

_STEP = re.compile(r"[0-9]{1,15}")
_DTYPES = get_args(get_type_hints(JobSpec)["dtype"])


def up(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOSTFILE] [SCRIPT.py] [-- ARGUMENTS]",
            help="Nodes to train on, one per line; a script that defines the job; and the script's own arguments.",
            show_default=False,
        ),
    ] = None,
    local: Annotated[
        str | None,
        typer.Option(
            "--local",
            metavar="N",
            help="Train on N virtual nodes of this machine; of kinds of their own as in fast:2,slow:2x4.",
        ),
    ] = None,
    hosts_from: inputs.HostsFromOption = None,
    hosts_every: inputs.HostsEveryOption = None,
    dial_in: inputs.DialInOption = None,
    num_nodes: inputs.NumNodesOption = None,
    keys: inputs.KeysOption = None,
    slurm: inputs.SlurmOption = False,
    slurm_job: inputs.SlurmJobOption = None,
    ray: inputs.RayOption = False,
    kubernetes: inputs.KubernetesOption = None,
    job_file: Annotated[
        Path | None, typer.Option("--job", metavar="FILE", help="YAML file of the job; without one, the default job.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of the job, as in optimizer.learning_rate=3e-4."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Train for N steps.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of weights, samples and dropout.")] = None,
    fault_threshold: Annotated[
        int | None,
        typer.Option(
            "-f", "--fault-threshold", metavar="F", help="Number of simultaneous node failures that never cost state."
        ),
    ] = None,
    pipelines: Annotated[
        int | None, typer.Option("--pipelines", metavar="N", help="Ask the planner for exactly N pipelines.")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option("--tp", metavar="N", help="Devices of a node that share each stage; virtual nodes get this many."),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(
            "--scaling",
            metavar="all|efficient|deadline=TIME",
            help="Use all nodes, only those that add enough throughput, or the fewest that finish in time "
            "(deadline=2h).",
        ),
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Name of the run.")] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            "--kill", metavar="NODE@STEP", help="Kill a node once this step is committed, to see the run recover."
        ),
    ] = None,
    python: inputs.PythonOption = None,
    ssh_config: inputs.SSHConfigOption = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Show the plan without starting anything.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the dashboard.")] = False,
    as_json: JsonOption = False,
    summary: Annotated[
        Path | None, typer.Option("--summary", metavar="FILE", help="Write the closing summary as JSON.")
    ] = None,
    save_every: Annotated[
        str | None,
        typer.Option(
            "--save-every", metavar="STEPS|TIME", help="Save every so many steps (50), or at this interval (5m)."
        ),
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", metavar="N", help="Keep the N newest checkpoints.")] = None,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|never|PATH",
            help="Continue what is left of a run of this name (auto); start from the seed, and keep its files "
            "(never); or start from the checkpoint at PATH.",
        ),
    ] = "auto",
    verify: Annotated[
        int | None,
        typer.Option(
            "--verify",
            metavar="N",
            min=1,
            help="First compare N steps with the script by itself, as `oobleck verify` does; start only if all is "
            "equal.",
        ),
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Skip the check of the hostfile's nodes, which takes ten seconds.")
    ] = False,
    until_eof: Annotated[
        bool,
        typer.Option(
            "--until-eof",
            help="End the run, as SIGTERM does, once standard input ends, if it is a pipe: for programs that start "
            "runs, and may die.",
        ),
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", metavar="ADDRESS", help="Serve metrics for Prometheus on unix:PATH or a loopback PORT."
        ),
    ] = None,
    base_dir: BaseDirOption = None,
) -> None:
    """Train a job on the nodes of a hostfile or of a command that prints one, or on virtual nodes of this machine.

    Training continues when nodes are lost. Ctrl-C once finishes the step and stops; twice stops at once.
    """
    hostfile, script, arguments = _parse_words(words or [])
    source = inputs.read_source(
        hostfile,
        local=None if local is None else inputs.parse_local(local),
        hosts_from=hosts_from,
        hosts_every_s=hosts_every,
        dial_in=dial_in,
        num_nodes=num_nodes,
        slurm=slurm,
        slurm_job=slurm_job,
        ray=ray,
        kubernetes=kubernetes,
        keys=keys,
    )
    names = source.names
    if summary is not None and not os.access(expand_user(summary).parent, os.W_OK):
        raise UsageError(f"--summary: {summary} cannot be written; its directory must exist and be yours")
    if verify is not None and not dry:
        from oobleck.cli.verify import verify_first

        verify_first(job_file, script, arguments, settings or [], steps=verify)
    options = {
        "--steps": ("max_steps", steps),
        "--dtype": ("dtype", dtype),
        "--seed": ("seed", seed),
        "-f": ("fault_threshold", fault_threshold),
        "--pipelines": ("num_pipelines", pipelines),
        "--tp": ("tensor_parallel", tensor_parallel),
        "--tag": ("tag", tag),
    }

    def with_options(job: JobSpec) -> JobSpec:
        return _with_saving(_with_options(job, options), save_every, keep)

    asked = (job_file, script, arguments, settings or [])
    if dry:
        job, trainer = with_options(inputs.read_job(*asked, num_nodes=len(names))), None
    else:
        job, trainer = inputs.open_job(*asked, num_nodes=len(names), finish=with_options, are_virtual=local is not None)
    if trainer is not None and isinstance(trainer.resume, str) and resume == "auto":
        resume = trainer.resume  # what its train() was given
    if scaling is not None:
        with _blaming("--scaling"):
            job = replace(job, scaling=inputs.parse_scaling(scaling, job.scaling, now=datetime.now(UTC)))
    owner = _owner(job_file, script, base_dir_of(base_dir))
    if tag is None and owner and job.tag in (JobSpec().tag, script.stem if script is not None else None):
        own = default_tag(base_dir_of(base_dir), job.tag, owner)
        if own != job.tag:
            typer.echo(f"oobleck: another job's run is called {job.tag}; this one is {own} (--tag names it)", err=True)
        job = replace(job, tag=own)
    if job.num_pipelines is not None and job.num_pipelines > len(names):
        raise (ConfigError if pipelines is None else UsageError)(
            f"num_pipelines: {job.num_pipelines} pipelines are asked for, and there are {len(names)} nodes; "
            "a pipeline needs at least one node of its own"
        )
    if job.fault_threshold >= len(names) and job.fault_threshold > 1:
        typer.echo(
            f"oobleck: fault_threshold is {job.fault_threshold}, and there are {len(names)} nodes: "
            f"{len(names) - 1} of them can be lost at once at most",
            err=True,
        )
    if ssh_config is not None and local is not None:
        raise UsageError("--ssh-config: virtual nodes need none; leave it out, or name a hostfile instead of --local")
    if python is not None:
        _check_python(python, is_local=local is not None)
    address = _metrics_address(metrics) if metrics is not None else None
    config = readable_file(ssh_config, "ssh config") if ssh_config is not None else None
    known = None if isinstance(source, inputs.DialIn) else names
    kills = tuple(_parse_kill(text, known, job.max_steps) for text in kill or [])
    if dry:
        if summary is not None:
            raise UsageError("--summary: a dry run has none; leave it out, or take --json for the plan as JSON")
        from oobleck.cli.dry_run import dry_run

        dry_run(job, source, base_dir=base_dir_of(base_dir), resume=resume, as_json=as_json)
        return

    if job.tensor_parallel > 1 or job.schedule == "interleaved":
        _check_model(job)
    if trainer is not None and local is None and job.checkpoint.directory is None:
        typer.echo(
            "oobleck: the script needs the trained weights on this machine, and nodes save to their own "
            "~/.oobleck; unless that is shared, set checkpoint.directory to a directory that is",
            err=True,
        )
    from oobleck.cli.wiring import end_with_stdin

    from .run_job import Run, run_job

    if until_eof:
        end_with_stdin()
    run = Run(
        job=job,
        source=source,
        kills=kills,
        python=python,
        ssh_config=config,
        plain=plain,
        as_json=as_json,
        summary=summary,
        base_dir=base_dir_of(base_dir),
        resume=resume,
        check=not no_check,
        metrics=address,
        trainer=trainer,
        owner=owner,
    )
    raise SystemExit(run_job(run))


def _check_model(job: JobSpec) -> None:
    """Raise ConfigError for a model that devices cannot share, or that cannot be cut into as many chunks as are asked
    for, as far as this machine can read it; nodes ask too.
    """
    from oobleck.control.training import check_possible
    from oobleck.runtime.processes import outline_of

    try:
        outline = outline_of(job)
    except ConfigError as error:
        if str(error).startswith("tensor_parallel"):
            raise
    except ResourceLost:
        pass  # without torch, or a model that only nodes have
    else:
        check_possible(job, num_layers=len(outline.layers))


def _owner(job_file: Path | None, script: Path | None, base_dir: Path) -> str:
    """What a run is of, if the user has named no tag; empty for a file that a program has made for this run."""
    path = script if script is not None else job_file
    if path is None:
        return "the default job"
    found = os.path.abspath(expand_user(path))
    return "" if Path(found).is_relative_to(base_dir.resolve() / LAUNCHED_DIRECTORY) else found


def _parse_words(words: list[str]) -> tuple[Path | None, Path | None, tuple[str, ...]]:
    """Tell a hostfile, a script and the script's arguments apart: a script's name ends in .py."""
    scripts = [index for index, word in enumerate(words[:2]) if word.endswith(".py")]
    end = scripts[0] if scripts else len(words)
    if end > 1:
        raise UsageError(f"{words[1]}: there is nothing more to name but a script, whose name ends in .py")
    hostfile = Path(words[0]) if end else None
    script = Path(words[end]) if scripts else None
    return hostfile, script, tuple(words[end + 1 :])


@contextmanager
def _blaming(option: str) -> Iterator[None]:
    """Turn what a job refuses into an error of the command line: the job was possible without the option."""
    try:
        yield
    except ConfigError as error:
        raise UsageError(f"{option}: {error}") from error


def _with_saving(job: JobSpec, save_every: str | None, keep: int | None) -> JobSpec:
    spec = job.checkpoint
    if save_every is not None:
        with _blaming("--save-every"):
            spec = inputs.with_save_every(spec, save_every)
    if keep is not None:
        with _blaming("--keep"):
            spec = replace(spec, save_total_limit=keep)
    return replace(job, checkpoint=spec)


def _with_options(job: JobSpec, options: Mapping[str, tuple[str, object]]) -> JobSpec:
    """Apply the options that have a name of their own: each is the key of the job that it sets, and its value.

    All at once, for some are possible only together. Raises UsageError that names the option.
    """
    changes = {key: value for key, value in options.values() if value is not None}
    if changes.get("dtype", _DTYPES[0]) not in _DTYPES:
        raise UsageError(f"--dtype: {changes['dtype']} is not known; it is one of {', '.join(_DTYPES)}")
    try:
        return replace(job, **changes)  # type: ignore[arg-type]  # checked just above, and by JobSpec itself
    except ConfigError as error:
        given = {key: option for option, (key, value) in options.items() if value is not None}
        blamed = given.get(str(error).partition(":")[0])
        raise UsageError(f"{blamed or ', '.join(given.values())}: {error}") from error


def _metrics_address(text: str) -> MetricsAddress:
    from oobleck.runtime.metrics_output import parse_metrics_address

    return parse_metrics_address(text)


def _check_python(python: str, *, is_local: bool) -> None:
    """Virtual nodes are this machine: what is not there need not be started. What nodes have, only they know."""
    if not python or "\0" in python or (is_local and shutil.which(os.path.expanduser(python)) is None):
        raise UsageError(f"--python: there is no {python or 'interpreter without a name'}; name one that can be run")


def readable_file(path: Path, what: str) -> Path:
    """A file that others will read, from anywhere. Raises UserError where it cannot be read."""
    read_input(path, what)
    return expand_user(path).absolute()


def _parse_kill(text: str, nodes: tuple[str, ...] | None, max_steps: int) -> tuple[str, int]:
    """Read NODE@STEP; `nodes` is None where nobody knows yet who there will be."""
    node, at, step = text.rpartition("@")
    if not at or not _STEP.fullmatch(step):
        raise UsageError(f"--kill: {text!r} is not NODE@STEP, as in {nodes[-1] if nodes else 'node2'}@20")
    if nodes is not None and node not in nodes:
        raise UsageError(f"--kill: there is no node {node!r}; the nodes are {', '.join(nodes)}")
    if not 1 <= int(step) < max_steps:
        raise UsageError(f"--kill: step {step} is not between 1 and {max_steps - 1}, the last but one")
    return node, int(step)
