"""`oobleck keys`: make the keys of a run beforehand, where its master and its nodes get them from somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def keys(
    directory: Annotated[Path, typer.Argument(help="Where to write master.json and node.json.")],
    *,
    master: Annotated[
        str, typer.Option("--master", metavar="HOST:PORT", help="Where nodes are to dial in, unless they are told so.")
    ],
) -> None:
    """Make the keys by which a master and its nodes know each other: two files, for `up --keys` and `oobleck node`.

    The master needs both. Nodes need node.json alone, and must not have the other.
    """
    from oobleck.host.user_path import expand_user
    from oobleck.runtime.launchers import make_key_files
    from oobleck.runtime.node_process import parse_place

    parse_place(master)
    typer.echo(f"nodes need {make_key_files(expand_user(directory), master=master)}")
