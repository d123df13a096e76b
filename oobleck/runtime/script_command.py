"""Checks that the command of a run's ranks exists before they start, because each would fail in the same way.

The check executes no code of the user: it only looks for a module's packages. The ranks find what it cannot.
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
    """Raise ConfigError if a run's script, module or program does not exist on this node or cannot be executed.

    `inherited` is the ranks' environment before the run's own variables.
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
    """Look for a module like `python -m`, but without importing the packages around it."""
    found, searched = None, paths
    parts = name.split(".")
    for number, part in enumerate(parts, start=1):
        whole = ".".join(parts[:number])
        found = _find(whole, searched) if part else None
        if found is None:
            raise ConfigError(f"-m {name}: there is no module {whole} here; it is looked for in {paths[0]} first")
        if found.submodule_search_locations is None:
            searched = []
        # The rest may be anywhere, so only the ranks can tell whether it exists.
        elif (searched := list(found.submodule_search_locations)) and _moves(found):
            return
    assert found is not None
    if found.submodule_search_locations is not None and _find(f"{name}.__main__", searched) is None:
        raise ConfigError(f"-m {name}: this is a package without a __main__, so Python cannot run it; name a module")


def _find(name: str, paths: list[str]) -> ModuleSpec | None:
    found = PathFinder.find_spec(name, paths)
    # Other finders may know a module outside packages, as with editable installs.
    return found if found is not None or "." in name else importlib.util.find_spec(name)


def _moves(package: ModuleSpec) -> bool:
    """Whether a package may set the path of its modules itself."""
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
