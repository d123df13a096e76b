"""The options of `oobleck up`, and the job that they make of the one that a file or a script says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import typer

from oobleck.cli import inputs
from oobleck.cli.common_options import BaseDirOption, JsonOption
from oobleck.errors import ConfigError, UsageError
from oobleck.job import CheckpointSpec, JobSpec

_DTYPES = get_args(get_type_hints(JobSpec)["dtype"])
_OF_KEYS = {
    "max_steps": "--steps",
    "dtype": "--dtype",
    "seed": "--seed",
    "fault_threshold": "-f",
    "num_pipelines": "--pipelines",
    "tensor_parallel": "--tp",
    "tag": "--tag",
}
"""The option of each key of the job that has one to itself."""


@dataclass(frozen=True, kw_only=True)
class _Nodes(inputs.NodeOptions):
    local: Annotated[
        str | None,
        typer.Option(
            "--local",
            metavar="N",
            help="Train on N virtual nodes of this machine; of kinds of their own as in fast:2,slow:2x4.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What is given to `oobleck up`."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOSTFILE] [SCRIPT.py] [-- ARGUMENTS]",
            help="Nodes to train on, one per line; a script that defines the job; and the script's own arguments.",
            show_default=False,
        ),
    ] = None
    nodes: _Nodes
    job_file: Annotated[
        Path | None, typer.Option("--job", metavar="FILE", help="YAML file of the job; without one, the default job.")
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of the job, as in optimizer.learning_rate=3e-4."
        ),
    ] = None
    max_steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Train for N steps.")] = None
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")] = None
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of weights, samples and dropout.")] = None
    fault_threshold: Annotated[
        int | None,
        typer.Option(
            "-f", "--fault-threshold", metavar="F", help="Number of simultaneous node failures that never cost state."
        ),
    ] = None
    num_pipelines: Annotated[
        int | None, typer.Option("--pipelines", metavar="N", help="Ask the planner for exactly N pipelines.")
    ] = None
    tensor_parallel: Annotated[
        int | None,
        typer.Option("--tp", metavar="N", help="Devices of a node that share each stage; virtual nodes get this many."),
    ] = None
    scaling: Annotated[
        str | None,
        typer.Option(
            "--scaling",
            metavar="all|efficient|deadline=TIME",
            help="Use all nodes, only those that add enough throughput, or the fewest that finish in time "
            "(deadline=2h).",
        ),
    ] = None
    tag: Annotated[str | None, typer.Option("--tag", help="Name of the run.")] = None
    kill: Annotated[
        list[str] | None,
        typer.Option(
            "--kill", metavar="NODE@STEP", help="Kill a node once this step is committed, to see the run recover."
        ),
    ] = None
    python: inputs.PythonOption = None
    ssh_config: inputs.SSHConfigOption = None
    dry: Annotated[bool, typer.Option("--dry-run", help="Show the plan without starting anything.")] = False
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the dashboard.")] = False
    as_json: JsonOption = False
    summary: Annotated[
        Path | None, typer.Option("--summary", metavar="FILE", help="Write the closing summary as JSON.")
    ] = None
    save_every: Annotated[
        str | None,
        typer.Option(
            "--save-every", metavar="STEPS|TIME", help="Save every so many steps (50), or at this interval (5m)."
        ),
    ] = None
    keep: Annotated[int | None, typer.Option("--keep", metavar="N", help="Keep the N newest checkpoints.")] = None
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|never|PATH",
            help="Continue what is left of a run of this name (auto); start from the seed, and keep its files "
            "(never); or start from the checkpoint at PATH.",
        ),
    ] = "auto"
    verify: Annotated[
        int | None,
        typer.Option(
            "--verify",
            metavar="N",
            min=1,
            help="First compare N steps with the script by itself, as `oobleck verify` does; start only if all is "
            "equal.",
        ),
    ] = None
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Skip the check of the hostfile's nodes, which takes ten seconds.")
    ] = False
    until_eof: Annotated[
        bool,
        typer.Option(
            "--until-eof",
            help="End the run, as SIGTERM does, once standard input ends, if it is a pipe: for programs that start "
            "runs, and may die.",
        ),
    ] = False
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", metavar="ADDRESS", help="Serve metrics for Prometheus on unix:PATH or a loopback PORT."
        ),
    ] = None
    base_dir: BaseDirOption = None

    def applied_to(self, job: JobSpec) -> JobSpec:
        """Return a job with what options say in place of its own. Raises UsageError that names the option.

        All at once, for some are possible only together.
        """
        if self.dtype not in (None, *_DTYPES):
            raise UsageError(f"--dtype: {self.dtype} is not known; it is one of {', '.join(_DTYPES)}")
        changes = {key: value for key in _OF_KEYS if (value := getattr(self, key)) is not None}
        try:
            job = replace(job, **changes)
        except ConfigError as error:
            key = str(error).partition(":")[0]
            blamed = [_OF_KEYS[key]] if key in changes else map(_OF_KEYS.__getitem__, changes)
            raise UsageError(f"{', '.join(blamed)}: {error}") from error
        return replace(job, checkpoint=self._saving(job))

    def _saving(self, job: JobSpec) -> CheckpointSpec:
        spec = job.checkpoint
        if self.save_every is not None:
            with _blaming("--save-every"):
                spec = inputs.with_save_every(spec, self.save_every)
        if self.keep is not None:
            with _blaming("--keep"):
                spec = replace(spec, save_total_limit=self.keep)
        return spec

    def scaled(self, job: JobSpec) -> JobSpec:
        """Return a job with `--scaling`, whose deadline may count from now."""
        if self.scaling is None:
            return job
        with _blaming("--scaling"):
            return replace(job, scaling=inputs.parse_scaling(self.scaling, job.scaling, now=datetime.now(UTC)))


@contextmanager
def _blaming(option: str) -> Iterator[None]:
    """Turn what a job refuses into an error of the command line: the job was possible without the option."""
    try:
        yield
    except ConfigError as error:
        raise UsageError(f"{option}: {error}") from error
