"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oobleck.bounds import bounds_of
from oobleck.job import DataSpec, JobSpec
from oobleck.runtime.files import BASE_DIR_VARIABLE, default_base_dir
from oobleck.user_path import expand_user

__all__ = [
    "MAX_BATCH",
    "MAX_SEED",
    "MAX_TOKENS",
    "NUM_SPARE_NODES",
    "SLOW_FACTOR",
    "BaseDirOption",
    "JsonOption",
    "PythonOption",
    "SSHConfigOption",
    "TagArgument",
    "TagOption",
    "base_dir_of",
]

MAX_BATCH, MAX_TOKENS, MAX_SEED = (
    int(bounds_of(spec)[key].most)
    for spec, key in ((JobSpec, "global_batch_size"), (DataSpec, "sequence_length"), (JobSpec, "seed"))
)
"""What a job may have, options may ask for."""
NUM_SPARE_NODES = 4
"""Virtual nodes that are there to be added to a local run."""
SLOW_FACTOR = 1.5
"""A node that is so many times slower than the others is slow, unless the user says otherwise."""

BaseDirOption = Annotated[
    Path | None,
    typer.Option(
        "--base-dir",
        help="Directory of all runs.",
        envvar=BASE_DIR_VARIABLE,
        show_default="~/.oobleck",
        file_okay=False,
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

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

TagArgument = Annotated[
    str | None, typer.Argument(help="Tag of the run; optional if exactly one is active.", show_default=False)
]

TagOption = Annotated[str | None, typer.Option("--tag", help="Tag of the run; optional if exactly one is active.")]


def base_dir_of(given: Path | None) -> Path:
    """The directory of all runs that an option names, or the default one."""
    return expand_user(given) if given is not None else default_base_dir()
