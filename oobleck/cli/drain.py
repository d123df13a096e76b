"""`oobleck drain`: take a node out of a run, without losing anything."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from oobleck.runtime.control_client import DrainRequest, find_run, request

from .inputs import BaseDirOption, JsonOption, TagOption, base_dir_of

__all__ = ["drain"]

NodeArgument = Annotated[str, typer.Argument(help="Name of the node, as in the hostfile or `oobleck status`.")]


def drain(
    node: NodeArgument, *, tag: TagOption = None, as_json: JsonOption = False, base_dir: BaseDirOption = None
) -> None:
    """Let a node finish the step, give away what only it holds, and leave the run."""
    run = find_run(base_dir_of(base_dir), tag)
    answer = request(run.control_socket, DrainRequest(node=node))
    typer.echo(json.dumps(answer) if as_json else f"{node} leaves run {run.tag}")
