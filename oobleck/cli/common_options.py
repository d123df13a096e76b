"""Options of all commands that look at runs, and of those that print JSON.

Commands that only ask a run something load no more than these of what users write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from oobleck.errors import UsageError
from oobleck.host.user_path import expand_user
from oobleck.runtime.files import BASE_DIR_VARIABLE, default_base_dir

T = TypeVar("T")

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


def takes_options(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a command of a function that takes its options as one value.

    Each annotated field of a dataclass is an option, or an argument; a field that is a dataclass itself stands for all
    of its own.
    """

    def made(function: Callable[[T], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**given: Any) -> None:
            function(_filled(options, given))

        command.__signature__ = Signature([*_parameters(options)])  # type: ignore[attr-defined]  # where typer looks
        return command

    return made


def _parameters(options: type) -> Iterator[Parameter]:
    hints = get_type_hints(options, include_extras=True)
    for part in fields(options):
        hint = hints[part.name]
        if is_dataclass(hint):
            yield from _parameters(hint)  # type: ignore[arg-type]  # a type, for it is a hint
        elif get_origin(hint) is Annotated:
            default = Parameter.empty if part.default is MISSING else part.default
            yield Parameter(part.name, Parameter.KEYWORD_ONLY, annotation=hint, default=default)


def _filled(options: type[T], given: Mapping[str, Any]) -> T:
    hints = get_type_hints(options)
    own = {part.name: hints[part.name] for part in fields(options)}  # type: ignore[arg-type]  # it is a dataclass
    groups = {name: _filled(hint, given) for name, hint in own.items() if isinstance(hint, type) and is_dataclass(hint)}
    return options(**{name: given[name] for name in own.keys() & given.keys() - groups.keys()}, **groups)


def one_run(named: str | None, tag: str | None) -> str | None:
    """The run that a command line names, as an argument or by --tag. Raises UsageError where these are two."""
    if named is not None and tag is not None and named != tag:
        raise UsageError(f"--tag: two runs are named, {named} and {tag}; leave one out")
    return named if tag is None else tag


def base_dir_of(given: Path | None) -> Path:
    """The directory of all runs that an option names, or the default one."""
    return expand_user(given) if given is not None else default_base_dir()
