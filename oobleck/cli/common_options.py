"""The options of all commands that look at runs, and of those that print JSON."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from oobleck.errors import UsageError
from oobleck.host.user_path import expand_user
from oobleck.runtime.files import BASE_DIR_VARIABLE, default_base_dir

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


def complete_tags(incomplete: str) -> list[str]:
    """Return the tags of all runs that begin like this, for a shell."""
    return sorted(lock.parent.name for lock in default_base_dir().glob(f"{glob.escape(incomplete)}*/lock"))


def complete_resume(incomplete: str) -> list[str]:
    """Return `auto`, `newest`, `never` and the paths of checkpoints that begin like this, for a shell."""
    saved = (path.parent for path in default_base_dir().glob("*/checkpoints/*/manifest.json"))
    return [word for word in ("auto", "newest", "never", *sorted(map(str, saved))) if word.startswith(incomplete)]


TagArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[TAG]",
        help="Tag of the run, as of --tag; optional if exactly one is active.",
        show_default=False,
        autocompletion=complete_tags,
    ),
]

TagOption = Annotated[
    str | None,
    typer.Option("--tag", help="Tag of the run; optional if exactly one is active.", autocompletion=complete_tags),
]


def one_run(named: str | None, tag: str | None) -> str | None:
    """Return the run that an argument or --tag names. Raises UsageError if they name two."""
    if named is not None and tag is not None and named != tag:
        raise UsageError(f"--tag: two runs are named, {named} and {tag}; leave one out")
    return named if tag is None else tag


def base_dir_of(named: Path | None) -> Path:
    """Return the directory of all runs: the one that an option names, or the default one."""
    return expand_user(named) if named is not None else default_base_dir()


def continuing(command: str) -> str:
    """Return a noted command without `--resume`."""
    directory, _, line = command.partition(" && ")
    try:
        words = shlex.split(line)
    except ValueError:  # it was not noted as a whole
        return command
    kept = without_resume(words)
    return f"{directory} && {shlex.join(kept)}" if kept != words else command


def without_resume(words: Sequence[str]) -> list[str]:
    """Return a command's words without `--resume`: `never` would start over, and a path go back to that checkpoint."""
    end = words.index("--") if "--" in words else len(words)
    own = words[:end]
    values = {index + 1 for index, word in enumerate(own) if word == "--resume"}
    kept = [word for index, word in enumerate(own) if index not in values and word.partition("=")[0] != "--resume"]
    return [*kept, *words[end:]]
