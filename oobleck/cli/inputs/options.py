"""Options that several commands share which start or plan runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oobleck.job import DataSpec, JobSpec
from oobleck.job.bounds import bounds_of

from .durations import duration_s

MAX_BATCH, MAX_TOKENS, MAX_SEED = (
    int(bounds_of(spec)[key].most)
    for spec, key in ((JobSpec, "global_batch_size"), (DataSpec, "sequence_length"), (JobSpec, "seed"))
)
"""What a job may have, options may ask for."""
NUM_SPARE_NODES = 4
"""Virtual nodes that are there to be added to a local run."""
SLOW_FACTOR = 1.5
"""A node that is so many times slower than the others is slow, unless the user says otherwise."""

HostsFromOption = Annotated[
    str | None,
    typer.Option("--hosts-from", metavar="COMMAND", help="Take the nodes from a shell command that prints a hostfile."),
]

HostsEveryOption = Annotated[
    float | None,
    typer.Option(
        "--hosts-every",
        metavar="TIME",
        parser=duration_s,
        help="How often --hosts-from is asked again (10s); nodes that appear join, those that vanish are drained.",
    ),
]

DialInOption = Annotated[
    str | None,
    typer.Option(
        "--dial-in",
        metavar="[HOST:]PORT",
        help="Listen there for nodes that dial in: `oobleck node`, where nobody may log in.",
    ),
]

NumNodesOption = Annotated[int | None, typer.Option("--nodes", metavar="N", help="Begin once N nodes have dialled in.")]

KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIRECTORY", help="Use keys that `oobleck keys` has made for nodes that dial in."),
]

SlurmOption = Annotated[
    bool, typer.Option("--slurm", help="Take the nodes of the Slurm allocation that this command is in.")
]

SlurmJobOption = Annotated[
    str | None,
    typer.Option("--slurm-job", metavar="NAME", help="Take the nodes of all Slurm jobs that run by this name."),
]

RayOption = Annotated[bool, typer.Option("--ray", help="Take the nodes of the Ray cluster that runs here.")]

KubernetesOption = Annotated[
    str | None,
    typer.Option("--kubernetes", metavar="LABELS", help="In a pod: take the pods with these labels, which dial in."),
]

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
