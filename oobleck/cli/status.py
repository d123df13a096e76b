"""`oobleck status`: what a run is doing, asked over its control socket."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from oobleck.control.journal import RunSnapshot
from oobleck.errors import PeerError
from oobleck.runtime.control_client import StatusRequest, find_run, request
from oobleck.ui.dashboard import Dashboard
from oobleck.wire import from_builtins

from .inputs import BaseDirOption, JsonOption, TagArgument, base_dir_of

__all__ = ["status"]


def status(tag: TagArgument = None, *, as_json: JsonOption = False, base_dir: BaseDirOption = None) -> None:
    """Show what a run is doing: its progress, its pipelines, its nodes and its last events."""
    run = find_run(base_dir_of(base_dir), tag)
    answer = request(run.control_socket, StatusRequest())
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    try:
        snapshot = from_builtins(RunSnapshot, answer)
    except PeerError as error:
        raise PeerError(f"run {run.tag} is of another version of Oobleck: {error}") from error
    Console().print(Dashboard(snapshot, fill=False))
