"""Groups of options that several commands share, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast, get_args

from oobleck.cli.option_fields import flag, one_of, option
from oobleck.errors import UsageError
from oobleck.host.user_path import expand_user
from oobleck.job import MAX_CHUNKS, MAX_DEVICES, MAX_NODES, DataSpec, JobSpec, ScheduleName
from oobleck.job.bounds import bounds_of
from oobleck.runtime.files import read_input

from .job_file import all_keys
from .kinds_option import KindCount
from .values import duration_s, whole

# Options may ask for what a job may have.
_MAX_BATCH, _MAX_TOKENS, MAX_SEED = (
    int(bounds_of(spec)[key].most)
    for spec, key in ((JobSpec, "global_batch_size"), (DataSpec, "sequence_length"), (JobSpec, "seed"))
)
SCHEDULE_NAMES = ", ".join(get_args(ScheduleName))
NUM_SPARE_NODES = 4
"""Virtual nodes that can be added to a local run."""
SLOW_FACTOR = 1.5
"""A node that takes this many times as long as the others is slow, unless the user names another factor."""


def complete_keys(incomplete: str) -> list[str]:
    """Return the keys of a job that begin like this, each with its `=`, for a shell."""
    keys = list(all_keys(JobSpec))
    leaves = (key for key in keys if not any(other.startswith(f"{key}.") for other in keys))
    return [f"{key}=" for key in leaves if f"{key}=".startswith(incomplete)]


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Where nodes come from; `read_source` turns it into one `NodeSource`."""

    panel: ClassVar[str] = "Nodes"

    # Each command declares `--local` itself. A command that lacks one of the others redeclares it without an option.
    local: int | str | tuple[KindCount, ...] | None = None
    hosts_from: str | None = option(
        "--hosts-from", "COMMAND", "Take the nodes from a shell command that prints a hostfile."
    )
    hosts_every: float | None = option(
        "--hosts-every",
        "TIME",
        "How often --hosts-from runs again (10s); nodes that appear join, those that vanish are drained.",
        parser=duration_s,
    )
    dial_in: str | None = option(
        "--dial-in", "[HOST:]PORT", "Listen there for nodes that dial in by `oobleck node`, without logins."
    )
    num_nodes: int | None = option("--nodes", "N", "Begin once N nodes have dialled in.")
    keys: Path | None = option("--keys", "DIRECTORY", "Use keys that `oobleck keys` has made for nodes that dial in.")
    slurm: bool = flag("--slurm", "Take the nodes of the Slurm allocation that this command runs in.")
    slurm_job: str | None = option("--slurm-job", "NAME", "Take the nodes of all running Slurm jobs of this name.")
    ray: bool = flag("--ray", "Take the nodes of the Ray cluster that runs here.")
    kubernetes: str | None = option(
        "--kubernetes", "LABELS", "In a pod: take the pods with these labels, which dial in."
    )


@dataclass(frozen=True, kw_only=True)
class ReachOptions:
    """How nodes are logged in to, and what runs there."""

    panel: ClassVar[str] = "Nodes"

    python: str | None = option("--python", "FILE", "Python interpreter on the nodes; by default, this one's path.")
    ssh_config: Path | None = option(
        "--ssh-config",
        "FILE",
        "Read this ssh config instead of ~/.ssh/config, as `ssh -F` does: Host, User, Port, IdentityFile, …",
    )

    def read_config(self) -> Path | None:
        """Return the absolute path of the ssh config, if one is named. Raises UserError if it cannot be read."""
        if self.ssh_config is None:
            return None
        read_input(self.ssh_config, "ssh config")
        return expand_user(self.ssh_config).absolute()


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A job file, and what replaces its values."""

    panel: ClassVar[str] = "Job"

    job_file: Path | None = option("--job", "FILE", "YAML file of the job; without one, the default job.")
    settings: list[str] | None = option(
        "--set",
        "KEY=VALUE",
        "Override a key of the job, as in optimizer.learning_rate=3e-4.",
        autocompletion=complete_keys,
    )


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """What a plan is computed from: what layers cost, measured or estimated, on which devices, for which batch."""

    panel: ClassVar[str] = "Model, devices and plan"

    profile_file: Path | None = option("--profile", "FILE", "JSON profile of the model on a device.")
    model: str | None = option(
        "--model", "NAME", "Estimate for this model: gpt3-6.7b, …, or a transformers config.json."
    )
    device: str | None = option(
        "--device",
        "NAME",
        "Estimate for this device: A10, A10G, A40, L4, L40S, 4090, A100, H100, H200, B200, CPU, or a data sheet "
        "(.json).",
    )
    profiles: str | None = option(
        "--profiles", "KIND:FILE,…", "Measured profiles of several kinds of nodes, in place of estimates."
    )
    devices_per_node: int = option(
        "--gpus-per-node", "G", "Devices of each node.", default=1, parser=whole(1, MAX_DEVICES)
    )
    global_batch: int = option("--global-batch", "B", "Samples in one step.", default=..., parser=whole(1, _MAX_BATCH))
    microbatch: int | None = option(
        "--microbatch", "b", "Samples in one microbatch; a profile sets its own.", parser=whole(1, _MAX_BATCH)
    )
    sequence_length: int | None = option(
        "--sequence-length", "T", "Tokens in a sample; a profile sets its own.", parser=whole(1, _MAX_TOKENS)
    )
    precision: str = option(
        "--precision",
        "NAME",
        "float32 or bfloat16, of estimates and of the device's peak.",
        default="bfloat16",
        autocompletion=one_of("float32", "bfloat16"),
    )
    recompute: str = option(
        "--recompute",
        "LEVEL",
        "What blocks recompute in estimates: none, selective, all, or auto: as much as each stage has to.",
        default="none",
        autocompletion=one_of("none", "selective", "all", "auto"),
    )
    recomputes_all: bool = flag("--activation-checkpointing", "Short for --recompute all.")
    fault_threshold: int = option(
        "-f",
        "--fault-threshold",
        "F",
        "Number of simultaneous node failures that never cost state.",
        default=1,
        parser=whole(0, MAX_NODES),
    )
    pipelines: int | None = option(
        "--pipelines", "P", "Ask the planner for exactly P pipelines.", parser=whole(1, MAX_NODES)
    )
    chunks: int = option(
        "--chunks", "V", "Chunks of layers in each interleaved stage.", default=2, parser=whole(2, MAX_CHUNKS)
    )


def parse_schedule_name(name: str) -> ScheduleName:
    """Return the name of a schedule. Raises UsageError for another."""
    if name not in get_args(ScheduleName):
        raise UsageError(f"--schedule is {name!r}; it must be one of {SCHEDULE_NAMES}")
    return cast("ScheduleName", name)
