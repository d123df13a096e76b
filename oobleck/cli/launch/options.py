"""The options of `oobleck up` as keyword arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from os import PathLike, fspath

import typer

from oobleck.cli.inputs import did_you_mean
from oobleck.cli.up import up
from oobleck.errors import UsageError, shown

_ARGUMENTS = frozenset({"base_dir", "job"})
"""`launch` has arguments of its own for these."""
_OF_TERMINALS = frozenset({"plain", "json", "dry_run", "until_eof", "help", "install_completion", "show_completion"})


@dataclass(frozen=True, slots=True)
class _Known:
    option: str
    is_flag: bool


@cache
def known_options() -> Mapping[str, _Known]:
    """Each option of `oobleck up` that a launched run takes, by its name as a keyword."""
    app = typer.Typer()
    app.command()(up)
    found: dict[str, _Known] = {}
    for parameter in typer.main.get_command(app).params:
        option = max(parameter.opts, key=len)
        keyword = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and keyword not in _ARGUMENTS | _OF_TERMINALS:
            found[keyword] = _Known(option, is_flag=bool(getattr(parameter, "is_flag", False)))
    return found


def option_words(options: Mapping[str, object]) -> Iterator[str]:
    """The words of a command line that say the same as these keyword arguments; None says nothing.

    Raises UsageError for an option that there is not, or a value that no command line can have.
    """
    for keyword, value in options.items():
        known = known_options().get(keyword)
        if known is None:
            raise UsageError(f"launch() has no option {keyword!r}; {did_you_mean(keyword, known_options())}")
        if known.is_flag:
            if not isinstance(value, bool):
                raise UsageError(f"{keyword}: expected True or False, got {shown(value)}")
            yield from (known.option,) if value else ()
        elif value is not None:
            yield from (f"{known.option}={text}" for text in _texts(keyword, value))


def _texts(keyword: str, value: object) -> list[str]:
    match value:
        case bool():
            pass
        case str() | int() | float():
            return [str(value)]
        case PathLike():
            return [str(fspath(value))]
        case Mapping() if keyword == "set":
            return [f"{key}={json.dumps(item)}" for key, item in value.items()]
        case Sequence():
            return [text for each in value for text in _texts(keyword, each)]
    raise UsageError(f"{keyword}: expected text, a number or a path, got {shown(value)}")
