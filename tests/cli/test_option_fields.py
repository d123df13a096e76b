"""A command's options, declared as the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from oobleck.cli.option_fields import given_options, option, takes_options


@dataclass(frozen=True, kw_only=True)
class Shared:
    size: Annotated[int, typer.Option("--size")]
    color: Annotated[str, typer.Option("--color")] = "red"
    shape: Annotated[str | None, typer.Option("--shape")] = None


@dataclass(frozen=True, kw_only=True)
class WithoutShape(Shared):
    color: Annotated[str, typer.Option("--colour")] = "blue"
    shape: None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    name: Annotated[str, typer.Argument()]
    size: WithoutShape
    """Called as one of its own options."""
    loud: Annotated[bool, typer.Option("--loud")] = False


def taken(*words: str) -> Options | str:
    """What a command is called with, or why it is not called."""
    seen: list[Options] = []
    app = typer.Typer()

    @app.command()
    @takes_options(Options)
    def command(options: Options) -> None:
        seen.append(options)

    result = CliRunner().invoke(app, words)
    return seen[0] if seen else result.output


def test_a_group_of_options_arrives_as_one_value() -> None:
    expected = Options(name="x", size=WithoutShape(size=3, color="green"), loud=True)
    assert taken("x", "--size", "3", "--colour", "green", "--loud") == expected
    assert taken("x", "--size", "3") == Options(name="x", size=WithoutShape(size=3))


@pytest.mark.parametrize(
    ("words", "blamed"),
    [
        (("x",), "--size"),
        (("x", "--size", "3", "--shape", "round"), "--shape"),
        (("x", "--size", "3", "--color", "green"), "--color"),
    ],
)
def test_what_a_group_requires_is_missed_and_what_a_command_leaves_out_is_unknown(
    words: tuple[str, ...], blamed: str
) -> None:
    told = taken(*words)
    assert isinstance(told, str)
    assert blamed in told


@dataclass(frozen=True, kw_only=True)
class Group:
    number: int = option("--number", "N", "A number.", default=2)
    letter: str = option("--letter", "A letter.", default="a")


@dataclass(frozen=True, kw_only=True)
class Knowing:
    group: Group
    loud: bool = option("--loud", "Loud.", default=False)
    given: frozenset[str] = given_options()


def test_a_command_knows_which_options_were_given_whatever_their_values_are() -> None:
    seen: list[Knowing] = []
    app = typer.Typer()

    @app.command()
    @takes_options(Knowing)
    def command(options: Knowing) -> None:
        seen.append(options)

    for words in ((), ("--number", "2"), ("--letter", "b", "--loud")):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert [each.given for each in seen] == [frozenset(), {"number"}, {"letter", "loud"}]
