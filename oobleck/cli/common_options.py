"""Options of all commands that look at runs, and of those that print JSON.

Commands that only ask a run something load no more than these of what users write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oobleck.runtime.files import BASE_DIR_VARIABLE, default_base_dir
from oobleck.user_path import expand_user

__all__ = ["BaseDirOption", "JsonOption", "TagArgument", "TagOption", "base_dir_of"]

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

TagArgument = Annotated[
    str | None, typer.Argument(help="Tag of the run; optional if exactly one is active.", show_default=False)
]

TagOption = Annotated[str | None, typer.Option("--tag", help="Tag of the run; optional if exactly one is active.")]


def base_dir_of(given: Path | None) -> Path:
    """The directory of all runs that an option names, or the default one."""
    return expand_user(given) if given is not None else default_base_dir()
