"""Options that several commands share which start or plan runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from oobleck.job import DataSpec, JobSpec
from oobleck.job.bounds import bounds_of

from .kinds_option import KindCount
from .values import duration_s

MAX_BATCH, MAX_TOKENS, MAX_SEED = (
    int(bounds_of(spec)[key].most)
    for spec, key in ((JobSpec, "global_batch_size"), (DataSpec, "sequence_length"), (JobSpec, "seed"))
)
"""What a job may have, options may ask for."""
NUM_SPARE_NODES = 4
"""Virtual nodes that are there to be added to a local run."""
SLOW_FACTOR = 1.5
"""A node that is so many times slower than the others is slow, unless the user says otherwise."""

PythonOption = Annotated[
    str | None, typer.Option("--python", help="Python interpreter on the nodes; by default, the path of this one.")
]

SSHConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--ssh-config",
        metavar="FILE",
        help="Read this ssh config instead of ~/.ssh/config, as `ssh -F` does: Host, User, Port, IdentityFile, …",
    ),
]


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Where nodes are to come from; `read_source` makes one `NodeSource` of it.

    A command that has no use for one of these options gives it a type without an option; each says itself what
    `--local` is.
    """

    local: int | str | tuple[KindCount, ...] | None = None
    hosts_from: Annotated[
        str | None,
        typer.Option(
            "--hosts-from", metavar="COMMAND", help="Take the nodes from a shell command that prints a hostfile."
        ),
    ] = None
    hosts_every: Annotated[
        float | None,
        typer.Option(
            "--hosts-every",
            metavar="TIME",
            parser=duration_s,
            help="How often --hosts-from is asked again (10s); nodes that appear join, those that vanish are drained.",
        ),
    ] = None
    dial_in: Annotated[
        str | None,
        typer.Option(
            "--dial-in",
            metavar="[HOST:]PORT",
            help="Listen there for nodes that dial in: `oobleck node`, where nobody may log in.",
        ),
    ] = None
    num_nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", help="Begin once N nodes have dialled in.")
    ] = None
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys", metavar="DIRECTORY", help="Use keys that `oobleck keys` has made for nodes that dial in."
        ),
    ] = None
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Take the nodes of the Slurm allocation that this command is in.")
    ] = False
    slurm_job: Annotated[
        str | None,
        typer.Option("--slurm-job", metavar="NAME", help="Take the nodes of all Slurm jobs that run by this name."),
    ] = None
    ray: Annotated[bool, typer.Option("--ray", help="Take the nodes of the Ray cluster that runs here.")] = False
    kubernetes: Annotated[
        str | None,
        typer.Option(
            "--kubernetes", metavar="LABELS", help="In a pod: take the pods with these labels, which dial in."
        ),
    ] = None
