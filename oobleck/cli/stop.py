"""`oobleck stop`: end a run from another terminal."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from oobleck.runtime.control_client import StopRequest, find_run, request

from .inputs import BaseDirOption, JsonOption, TagArgument, base_dir_of

__all__ = ["stop"]

NowOption = Annotated[bool, typer.Option("--now", help="Give up the step in flight.")]


def stop(
    tag: TagArgument = None, *, now: NowOption = False, as_json: JsonOption = False, base_dir: BaseDirOption = None
) -> None:
    """End a run: after the step in flight, or at once."""
    run = find_run(base_dir_of(base_dir), tag)
    answer = request(run.control_socket, StopRequest(now=now))
    how = "at once" if now else "after its step"
    typer.echo(json.dumps(answer) if as_json else f"run {run.tag} stops {how}")
