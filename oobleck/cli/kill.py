"""`oobleck kill`: lose a node on purpose."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from oobleck.runtime.control_client import KillRequest, find_run, request

from .inputs import BaseDirOption, JsonOption, TagOption, base_dir_of

__all__ = ["kill"]

NodeArgument = Annotated[str, typer.Argument(help="Name of the node, as in the hostfile or `oobleck status`.")]


def kill(
    node: NodeArgument, *, tag: TagOption = None, as_json: JsonOption = False, base_dir: BaseDirOption = None
) -> None:
    """Kill a node's agent and workers at once, as if its power had failed. The run recovers from it."""
    run = find_run(base_dir_of(base_dir), tag)
    answer = request(run.control_socket, KillRequest(node=node))
    typer.echo(json.dumps(answer) if as_json else f"killed {node} of run {run.tag}")
