"""Whether there is what the ranks of a run are to execute: asked before any starts, for each would find the same.

Nothing of the user's is executed for an answer: a module's packages are only looked for. What cannot be known that way
is left to the ranks.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from zipfile import is_zipfile

from oobleck.errors import ConfigError
from oobleck.job.ranks import RanksSpec

_MAINS = ("__main__.py", "__main__.pyc")


def check_command(run: RanksSpec, inherited: Mapping[str, str]) -> None:
    """Raise ConfigError for a script, a module or a program that is not on this node, or cannot be executed.

    `inherited` is the environment of its ranks, but for what the run itself gives them.
    """
    if not os.path.isdir(run.directory):
        raise ConfigError(f"there is no directory {run.directory} here, where the script is to run (--directory)")
    environment, name = {**inherited, **run.environment}, run.command[0]
    match run.entry:
        case "script":
            _check_script(Path(run.directory, name), name, run.directory)
        case "module":
            _check_module(name, [run.directory, *environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path])
        case "program":
            _check_program(name, run.directory, environment.get("PATH", os.defpath))


def _check_script(path: Path, name: str, directory: str) -> None:
    try:
        if path.is_dir():
            if not any((path / main).is_file() for main in _MAINS):
                raise ConfigError(
                    f"{name}: this is a directory without a __main__.py, so Python cannot run it; name the script in it"
                )
        elif not path.exists():
            raise ConfigError(f"{name}: there is no such script in {directory}")
        elif not is_zipfile(path):
            with path.open("rb"):
                pass
    except OSError as error:
        raise ConfigError(f"{name}: the script cannot be read: {error.strerror}") from error


def _check_module(name: str, paths: list[str]) -> None:
    """Look for a module as `python -m` does, without importing the packages that it is in."""
    found, searched = None, paths
    for number in range(len(parts := name.split("."))):
        whole = ".".join(parts[: number + 1])
        found = _find(whole, searched) if parts[number] else None
        if found is None:
            raise ConfigError(f"-m {name}: there is no module {whole} here; it is looked for in {paths[0]} first")
        if found.submodule_search_locations is None:
            searched = []
        elif (searched := list(found.submodule_search_locations)) and _moves(found):
            return
    assert found is not None
    if found.submodule_search_locations is not None and _find(f"{name}.__main__", searched) is None:
        raise ConfigError(f"-m {name}: this is a package without a __main__, so Python cannot run it; name a module")


def _find(name: str, paths: list[str]) -> ModuleSpec | None:
    """Find a module on paths; one that is not in a package may be known in other ways, as editable installs are."""
    found = PathFinder.find_spec(name, paths)
    return found if found is not None or "." in name else importlib.util.find_spec(name)


def _moves(package: ModuleSpec) -> bool:
    """Whether a package says by itself where its modules are."""
    try:
        return package.origin is not None and b"__path__" in Path(package.origin).read_bytes()
    except OSError:
        return True


def _check_program(name: str, directory: str, search_path: str) -> None:
    path = os.path.join(directory, name) if os.sep in name else shutil.which(name, path=search_path)
    if path is None or not os.path.exists(path):
        raise ConfigError(f"{name}: there is no such program here")
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise ConfigError(f"{name}: this cannot be executed; make it executable, or leave --no-python out")
