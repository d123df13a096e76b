"""Options of commands, declared as the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

T = TypeVar("T")

_OTHERS = "other"
_GIVEN = "given"
_CONTEXT = "context"


def option(*words: str, default: Any = None, **settings: Any) -> Any:
    """Declare a field of a dataclass as an option: its names, what its value is called, and its help, in this order.

    Without a word for the value, its type stands there. An option whose default is `...` is required. `settings` are
    those of `typer.Option`.
    """
    names = [word for word in words if word.startswith("-")]
    *value, text = words[len(names) :]
    word = value[0] if value else None
    declared = typer.Option(*names, metavar=word, help=text, **settings)
    return _field(default, declared=declared, shown=(names[-1], word, text))


def flag(name: str, text: str, **settings: Any) -> Any:
    """Declare a field as an option without a value."""
    return option(name, text, default=False, **settings)


def argument(metavar: str, text: str, *, default: Any = None) -> Any:
    """Declare a field as an argument."""
    declared = typer.Argument(metavar=metavar, help=text, show_default=False)
    return _field(default, declared=declared)


def given_options() -> Any:
    """Declare a field for the names of all fields whose options are on the command line, also with their defaults."""
    return field(default=frozenset(), metadata={_GIVEN: True})


def _field(default: Any, **metadata: Any) -> Any:
    # `...` is typer's own mark of a required option.
    return field(default=MISSING if default is ... else default, metadata=metadata)


def declared_options(group: type) -> Iterator[tuple[str, str | None, str]]:
    """Yield the name of each option that a dataclass declares, the word for its value unless it is a flag, its help."""
    for part in fields(group):
        if "shown" in part.metadata:
            yield part.metadata["shown"]


def declared_fields(group: type) -> Iterator[tuple[str, str, Any]]:
    """Yield the name of each field that declares an option, the option's name, and the field's type."""
    hints = get_type_hints(group)
    for part in fields(group):
        if "shown" in part.metadata:
            yield part.name, part.metadata["shown"][0], hints[part.name]


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Return a function that completes one of these words, or the last of several between commas, for a shell."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{word}" for word in words if word.startswith(last)]

    return complete


class GroupedCommand(TyperCommand):
    """A command whose help lists options below the names of their panels, in the order in which these first appear."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else _OTHERS)
                panels.setdefault(panel, []).append(record)
        others = panels.pop(_OTHERS, [])
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)
        if others:
            has_named = len(panels) > ("Arguments" in panels)
            with formatter.section("Other options" if has_named else "Options"):
                formatter.write_dl(others)


def takes_options(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a command of a function that takes its options as one value.

    Each field that is declared, or annotated as typer has it, is an option or an argument. A field that is a dataclass
    itself stands for all of its own fields. The help lists those of a dataclass with a `panel` below that name.
    """
    given = [part.name for part in fields(options) if _GIVEN in part.metadata]  # type: ignore[arg-type]  # a dataclass
    context = Parameter(_CONTEXT, Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def made(function: Callable[[T], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            if given:
                names = _names_given(values.pop(_CONTEXT), values)
                values |= dict.fromkeys(given, names)
            function(_filled(options, values))

        command.__signature__ = Signature([*_parameters(options), *([context] if given else [])])  # type: ignore[attr-defined]  # where typer looks
        return command

    return made


def _names_given(context: typer.Context, names: Iterable[str]) -> frozenset[str]:
    sources = {name: context.get_parameter_source(name) for name in names}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def _parameters(options: type, panel: str | None = None) -> Iterator[Parameter]:
    hints = get_type_hints(options, include_extras=True)
    panel = getattr(options, "panel", panel)
    for part in fields(options):
        hint, declared = hints[part.name], part.metadata.get("declared")
        if is_dataclass(hint):
            yield from _parameters(hint, panel)  # type: ignore[arg-type]  # a type, for it is a hint
        elif declared is not None or get_origin(hint) is Annotated:
            if isinstance(declared, OptionInfo) and declared.rich_help_panel is None:
                declared = copy(declared)  # another command may have the same group of options in another panel
                declared.rich_help_panel = panel
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
