"""`oobleck add`: give a run more nodes."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from oobleck.errors import OobleckError
from oobleck.runtime.control_client import AddRequest, find_run, request

from .inputs import BaseDirOption, JsonOption, TagOption, base_dir_of

__all__ = ["add"]

NodesArgument = Annotated[
    list[str], typer.Argument(help="Nodes: names that the run knows, or lines as in a hostfile, quoted.")
]


def add(
    nodes: NodesArgument, *, tag: TagOption = None, as_json: JsonOption = False, base_dir: BaseDirOption = None
) -> None:
    """Take nodes into a run, or take lost ones back. Training continues; they join between two steps."""
    run = find_run(base_dir_of(base_dir), tag)
    refused: list[OobleckError] = []
    for node in nodes:
        try:
            answer = request(run.control_socket, AddRequest(node=node))
        except OobleckError as error:  # the others are asked for all the same
            refused.append(error)
        else:
            typer.echo(json.dumps(answer) if as_json else f"{node} joins run {run.tag}")
    if refused:
        raise ExceptionGroup("some nodes are refused", refused)
