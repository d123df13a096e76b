"""How commands declare their options, and the options of all commands that look at runs or print JSON.

A command that only sends a run a request imports no more of `cli` than this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from oobleck.errors import UsageError
from oobleck.host.user_path import expand_user
from oobleck.runtime.files import BASE_DIR_VARIABLE, default_base_dir

T = TypeVar("T")

REQUIRED: Any = MISSING
"""The default of an option that has none."""

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
    str | None,
    typer.Argument(
        metavar="[TAG]", help="Tag of the run, as of --tag; optional if exactly one is active.", show_default=False
    ),
]

TagOption = Annotated[str | None, typer.Option("--tag", help="Tag of the run; optional if exactly one is active.")]


def option(*words: str, default: Any = None, **settings: Any) -> Any:
    """Declare a field of a dataclass as an option: its names, what its value is called, and its help, in this order.

    Without a word for the value, its type stands there. `settings` are those of `typer.Option`.
    """
    names = [word for word in words if word.startswith("-")]
    *value, text = words[len(names) :]
    word = value[0] if value else None
    declared = typer.Option(*names, metavar=word, help=text, **settings)
    return field(default=default, metadata={"declared": declared, "shown": (names[-1], word, text)})


def flag(name: str, text: str) -> Any:
    """Declare a field as an option without a value."""
    return option(name, text, default=False)


def argument(metavar: str, text: str, *, default: Any = None) -> Any:
    """Declare a field as an argument."""
    declared = typer.Argument(metavar=metavar, help=text, show_default=False)
    return field(default=default, metadata={"declared": declared})


def declared_options(group: type) -> Iterator[tuple[str, str | None, str]]:
    """Yield the name of each option that a dataclass declares, the word for its value unless it is a flag, its help."""
    for part in fields(group):
        if "shown" in part.metadata:
            yield part.metadata["shown"]


def takes_options(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a command of a function that takes its options as one value.

    Each field that is declared, or annotated as typer has it, is an option or an argument. A field that is a dataclass
    itself stands for all of its own fields.
    """

    def made(function: Callable[[T], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            function(_filled(options, values))

        command.__signature__ = Signature([*_parameters(options)])  # type: ignore[attr-defined]  # where typer looks
        return command

    return made


def _parameters(options: type) -> Iterator[Parameter]:
    hints = get_type_hints(options, include_extras=True)
    for part in fields(options):
        hint, declared = hints[part.name], part.metadata.get("declared")
        if is_dataclass(hint):
            yield from _parameters(hint)  # type: ignore[arg-type]  # a type, for it is a hint
        elif declared is not None or get_origin(hint) is Annotated:
            annotation = hint if declared is None else Annotated[hint, declared]
            default = Parameter.empty if part.default is MISSING else part.default
            yield Parameter(part.name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _filled(options: type[T], values: Mapping[str, Any]) -> T:
    hints = get_type_hints(options)
    own = {part.name: hints[part.name] for part in fields(options)}  # type: ignore[arg-type]  # it is a dataclass
    groups = {
        name: _filled(hint, values) for name, hint in own.items() if isinstance(hint, type) and is_dataclass(hint)
    }
    return options(**{name: values[name] for name in own.keys() & values.keys() - groups.keys()}, **groups)


def one_run(named: str | None, tag: str | None) -> str | None:
    """Return the run that an argument or --tag names. Raises UsageError if they name two."""
    if named is not None and tag is not None and named != tag:
        raise UsageError(f"--tag: two runs are named, {named} and {tag}; leave one out")
    return named if tag is None else tag


def base_dir_of(named: Path | None) -> Path:
    """Return the directory of all runs: the one that an option names, or the default one."""
    return expand_user(named) if named is not None else default_base_dir()
