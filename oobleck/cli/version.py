"""`oobleck version`: shows what is installed."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import typer

from oobleck import __version__

from .common_options import JsonOption

_PACKAGES = ("torch", "transformers", "trio", "asyncssh")


def version(*, as_json: JsonOption = False) -> None:
    """Show the versions of Oobleck, of Python, and of the packages that decide what runs."""
    versions = {"oobleck": __version__, "python": platform.python_version()}
    versions |= {package: installed(package) for package in _PACKAGES}
    if as_json:
        typer.echo(json.dumps(versions))
        return
    for name, number in versions.items():
        typer.echo(f"{name} {number}")


def installed(package: str) -> str:
    """Return the version of a package, without importing it."""
    try:
        return version_of(package)
    except PackageNotFoundError:
        return "not installed"
