"""What no start of ranks can change is refused before any: scripts, modules and programs that are not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal
from zipfile import ZipFile

import pytest

from oobleck.errors import ConfigError
from oobleck.job.ranks import RanksSpec
from oobleck.runtime.script_command import check_command


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with one of each kind."""
    for name in ("plain", "runs", "pkg/sub", "moving"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("train.py", "runs/__main__.py", "pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/m.py", "data.txt"):
        (tmp_path / name).write_text("raise AssertionError('imported')\n")
    (tmp_path / "moving" / "__init__.py").write_text("__path__.append('elsewhere')\n")
    with ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    return tmp_path


def spec(directory: Path, entry: Literal["script", "module", "program"], name: str) -> RanksSpec:
    return RanksSpec(tag="t", entry=entry, command=(name,), directory=str(directory))


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("script", "train.py"),
        ("script", "runs"),
        ("script", "archive.zip"),
        ("module", "train"),
        ("module", "runs"),
        ("module", "pkg.sub.m"),
        ("module", "moving.beyond"),
        ("module", "this"),
        ("module", "json.tool"),
        ("program", "true"),
        ("program", "/bin/sh"),
    ],
)
def test_what_can_be_executed_is_and_nothing_is_imported_for_the_answer(
    directory: Path, entry: Literal["script", "module", "program"], name: str
) -> None:
    check_command(spec(directory, entry, name), os.environ)


@pytest.mark.parametrize(
    ("entry", "name", "problem"),
    [
        ("script", "plain", "this is a directory without a __main__.py"),
        ("script", "nothing.py", "there is no such script in"),
        ("module", "nothing", "there is no module nothing here"),
        ("module", "pkg.nothing", "there is no module pkg.nothing here"),
        ("module", "pkg.sub.m.nothing", "there is no module pkg.sub.m.nothing here"),
        ("module", "pkg", "a package without a __main__"),
        ("module", "pkg..m", "there is no module pkg. here"),
        ("program", "no-such-program", "there is no such program here"),
        ("program", "./data.txt", "this cannot be executed"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    directory: Path, entry: Literal["script", "module", "program"], name: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_command(spec(directory, entry, name), os.environ)


def test_modules_are_looked_for_where_ranks_are_told_to(directory: Path) -> None:
    (directory / "more").mkdir()
    (directory / "more" / "extra.py").touch()
    run = spec(directory, "module", "extra")
    with pytest.raises(ConfigError):
        check_command(run, {})
    check_command(run, {"PYTHONPATH": str(directory / "more")})
