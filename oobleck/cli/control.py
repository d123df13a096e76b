"""`oobleck status`, `kill`, `add`, `drain`, `stop`: send a run a request over its socket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oobleck.errors import OobleckError, PeerError, UsageError
from oobleck.json_table import to_json
from oobleck.runtime import control_client
from oobleck.runtime.files import RunDirectory
from oobleck.wire import from_builtins

from .common_options import BaseDirOption, JsonOption, TagArgument, TagOption, base_dir_of, one_run

if TYPE_CHECKING:
    from oobleck.ui.controls import Wish


def complete_nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the nodes of the run that begin like this, for a shell."""
    return [name for name, _ in _nodes(ctx) if name.startswith(incomplete)]


def complete_lost(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the lost nodes of the run that begin like this, for a shell."""
    return [name for name, state in _nodes(ctx) if state == "lost" and name.startswith(incomplete)]


def _nodes(ctx: typer.Context) -> list[tuple[str, str]]:
    """Return the names and states of the nodes of the run that a command line names, or of the only one."""
    try:
        run = find_active(ctx.params.get("tag"), ctx.params.get("base_dir"))
        answer = control_client.request(run.control_socket, control_client.StatusRequest())
    except OobleckError:
        return []
    nodes = answer.get("nodes")
    return [(str(node["name"]), str(node["state"])) for node in nodes] if isinstance(nodes, list) else []


NODE_HELP = "Name of the node, as in the hostfile or `oobleck status`."
NodeArgument = Annotated[str, typer.Argument(help=NODE_HELP, autocompletion=complete_nodes)]
NodesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Nodes: names that the run knows, or lines as in a hostfile, quoted.", autocompletion=complete_lost
    ),
]
NowOption = Annotated[bool, typer.Option("--now", help="Give up the step in flight.")]


def status(
    named: TagArgument = None,
    *,
    tag: TagOption = None,
    follow: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it until it ends, or until Ctrl-C; the run goes on.")
    ] = False,
    as_json: JsonOption = False,
    base_dir: BaseDirOption = None,
) -> None:
    """Show what a run is doing: its progress, its pipelines, its nodes and its last events."""
    if follow:
        if as_json:
            raise UsageError("--watch: with --json there is one answer; leave one of them out")
        from .following import watch

        watch(find_active(one_run(named, tag), base_dir))
        return
    name, answer = _ask(control_client.StatusRequest(), one_run(named, tag), base_dir)
    # The other commands of this module draw nothing, and start faster without these.
    from rich.console import Console

    from oobleck.control.journal import RunSnapshot
    from oobleck.ui.dashboard import Dashboard

    try:
        snapshot = from_builtins(RunSnapshot, answer)
    except PeerError as error:
        raise PeerError(f"run {name} is of another version of Oobleck: {error}") from error
    if as_json:
        typer.echo(to_json(snapshot.to_dict(), indent=2))
        return
    Console().print(Dashboard(snapshot, fill=False))


def kill(
    node: NodeArgument, *, tag: TagOption = None, as_json: JsonOption = False, base_dir: BaseDirOption = None
) -> None:
    """Kill a node's agent and workers at once, as if its power had failed. The run recovers from it."""
    name, answer = _ask(control_client.KillRequest(node=node), tag, base_dir)
    typer.echo(json.dumps(answer) if as_json else f"killed {node} of run {name}")


def add(
    nodes: NodesArgument, *, tag: TagOption = None, as_json: JsonOption = False, base_dir: BaseDirOption = None
) -> None:
    """Take nodes into a run, or take lost ones back. Training continues; they join between two steps."""
    run = find_active(tag, base_dir)
    refused: list[OobleckError] = []
    for node in nodes:
        try:
            answer = control_client.request(run.control_socket, control_client.AddRequest(node=node))
        except OobleckError as error:  # the other nodes may still join
            refused.append(error)
        else:
            typer.echo(json.dumps(answer) if as_json else f"{node} joins run {run.tag}")
    if refused:
        raise ExceptionGroup("some nodes are refused", refused)


def drain(
    node: NodeArgument, *, tag: TagOption = None, as_json: JsonOption = False, base_dir: BaseDirOption = None
) -> None:
    """Let a node finish the step, give away what only it holds, and leave the run."""
    name, answer = _ask(control_client.DrainRequest(node=node), tag, base_dir)
    typer.echo(json.dumps(answer) if as_json else f"{node} leaves run {name}")


def stop(
    named: TagArgument = None,
    *,
    tag: TagOption = None,
    now: NowOption = False,
    as_json: JsonOption = False,
    base_dir: BaseDirOption = None,
) -> None:
    """End a run: after the step in flight, or at once."""
    name, answer = _ask(control_client.StopRequest(now=now), one_run(named, tag), base_dir)
    how = "at once" if now else "after its step"
    typer.echo(json.dumps(answer) if as_json else f"run {name} stops {how}")


def _ask(
    asked: control_client.ControlRequest, tag: str | None, base_dir: Path | None
) -> tuple[str, Mapping[str, object]]:
    run = find_active(tag, base_dir)
    return run.tag, control_client.request(run.control_socket, asked)


def request_of(wish: Wish) -> control_client.ControlRequest:
    """Return the request for what a user wants at a dashboard."""
    match wish.what:
        case "kill":
            return control_client.KillRequest(node=wish.node)
        case "drain":
            return control_client.DrainRequest(node=wish.node)
    return control_client.StopRequest()


def find_active(tag: str | None, base_dir: Path | None) -> RunDirectory:
    """Return the run with this tag, or the only one. Raises NoActiveRun, which describes a run without a master."""
    directory = base_dir_of(base_dir)
    try:
        return control_client.find_run(directory, tag)
    except control_client.NoActiveRun as error:
        from .masterless import describe_masterless  # it reads journals, which takes long to import

        raise control_client.NoActiveRun(describe_masterless(directory, tag) or str(error)) from error
