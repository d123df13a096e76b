"""The options of `oobleck up`, and how they change the job of a file or a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args, get_type_hints

from oobleck.cli import inputs
from oobleck.cli.common_options import BaseDirOption, JsonOption, complete_resume, complete_tags
from oobleck.cli.option_fields import argument, flag, one_of, option
from oobleck.errors import ConfigError, UsageError
from oobleck.job import MAX_STEPS, CheckpointSpec, JobSpec

_DTYPES = get_args(get_type_hints(JobSpec)["dtype"])
_OPTION_OF_KEY = {
    "max_steps": "--steps",
    "dtype": "--dtype",
    "seed": "--seed",
    "fault_threshold": "-f",
    "num_pipelines": "--pipelines",
    "tensor_parallel": "--tp",
    "tag": "--tag",
}


@dataclass(frozen=True, kw_only=True)
class _Nodes(inputs.NodeOptions):
    local: str | None = option(
        "--local", "N", "Train on N virtual nodes of this machine; of several kinds as in fast:2,slow:2x4."
    )


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    words: list[str] | None = argument(
        "[HOSTFILE] [SCRIPT.py] [-- ARGUMENTS]",
        "Nodes to train on, one per line; a script that defines the job; and the script's own arguments.",
    )
    nodes: _Nodes
    job: inputs.JobOptions
    max_steps: int | None = option("--steps", "N", "Train for N steps.", rich_help_panel="Job")
    dtype: str | None = option(
        "--dtype", "float32, bfloat16, float16 or float64.", autocompletion=one_of(*_DTYPES), rich_help_panel="Job"
    )
    seed: int | None = option("--seed", "Seed of weights, samples and dropout.", rich_help_panel="Job")
    fault_threshold: int | None = option(
        "-f",
        "--fault-threshold",
        "F",
        "Number of simultaneous node failures that never cost state.",
        rich_help_panel="Plan",
    )
    num_pipelines: int | None = option(
        "--pipelines", "N", "Ask the planner for exactly N pipelines.", rich_help_panel="Plan"
    )
    tensor_parallel: int | None = option(
        "--tp", "N", "Devices of a node that share each stage; virtual nodes get this many.", rich_help_panel="Plan"
    )
    scaling: str | None = option(
        "--scaling",
        "all|efficient|deadline=TIME",
        "Use all nodes, only those that add enough throughput, or the fewest that finish in time (deadline=2h).",
        autocompletion=one_of("all", "efficient", "deadline="),
        rich_help_panel="Plan",
    )
    tag: str | None = option("--tag", "Name of the run.", autocompletion=complete_tags, rich_help_panel="Run")
    kill: list[str] | None = option(
        "--kill", "NODE@STEP", "Kill a node once this step is committed, to see the run recover.", rich_help_panel="Run"
    )
    reach: inputs.ReachOptions
    environment: inputs.EnvironmentOptions
    dry: bool = flag("--dry-run", "Show the plan without starting anything.", rich_help_panel="Run")
    detach: bool = option(
        "-d",
        "--detach",
        "Return once the job is accepted; `oobleck attach` shows the run.",
        default=False,
        rich_help_panel="Run",
    )
    plain: bool = flag("--plain", "Print lines instead of the dashboard.", rich_help_panel="Output")
    as_json: JsonOption = False
    summary: Path | None = option("--summary", "FILE", "Write the closing summary as JSON.", rich_help_panel="Output")
    save_every: str | None = option(
        "--save-every",
        "STEPS|TIME",
        "Save after this many steps (50), or at this interval (5m).",
        rich_help_panel="Checkpoints",
    )
    keep: int | None = option("--keep", "N", "Keep the N newest checkpoints.", rich_help_panel="Checkpoints")
    resume: str = option(
        "--resume",
        "auto|newest|never|PATH",
        "Continue from what a run of this name has left (auto), of which there must be some (newest); start from the "
        "seed, but keep its files (never); or start from the checkpoint at PATH.",
        autocompletion=complete_resume,
        default="auto",
        rich_help_panel="Checkpoints",
    )
    verify: int | None = option(
        "--verify",
        "N",
        "First compare N steps with the script by itself, as `oobleck verify` does; start only if all is equal.",
        parser=inputs.whole(1, MAX_STEPS),
        rich_help_panel="Run",
    )
    no_check: bool = flag(
        "--no-check", "Skip the check of the hostfile's nodes, which takes ten seconds.", rich_help_panel="Nodes"
    )
    until_eof: bool = flag(
        "--until-eof",
        "End the run, as SIGTERM does, once standard input ends, if it is a pipe: for programs that start runs "
        "and may die.",
        rich_help_panel="Run",
    )
    metrics: str | None = option(
        "--metrics",
        "ADDRESS",
        "Serve metrics for Prometheus on unix:PATH, a loopback PORT, or ADDRESS:PORT.",
        rich_help_panel="Output",
    )
    base_dir: BaseDirOption = None

    def applied_to(self, job: JobSpec) -> JobSpec:
        """Return a job with the values of these options. Raises UsageError that names the option."""
        if self.dtype not in (None, *_DTYPES):
            raise UsageError(f"--dtype: {self.dtype} is not known; it is one of {', '.join(_DTYPES)}")
        changes = {key: value for key in _OPTION_OF_KEY if (value := getattr(self, key)) is not None}
        try:
            job = replace(job, **changes)  # all at once: some are possible only together
        except ConfigError as error:
            key = str(error).partition(":")[0]
            blamed = [_OPTION_OF_KEY[key]] if key in changes else map(_OPTION_OF_KEY.__getitem__, changes)
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
    try:
        yield
    except ConfigError as error:
        # Without the option the job was possible, so the command line is to blame.
        raise UsageError(f"{option}: {error}") from error
