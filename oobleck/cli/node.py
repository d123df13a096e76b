"""`oobleck node` gives this machine to a run whose master cannot log in here; `oobleck keys` makes its keys."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from oobleck.errors import UsageError

from .inputs import parse_hostfile


def node(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The run's keys for its nodes: node.json.")],
    line: Annotated[
        str | None,
        typer.Argument(
            metavar="[LINE]",
            help="This node's line of a hostfile: 'worker3 slots=8'. By default, this machine's name, with one device.",
        ),
    ] = None,
    *,
    master: Annotated[
        str | None, typer.Option("--master", metavar="HOST:PORT", help="Where to dial in, instead of where FILE says.")
    ] = None,
) -> None:
    """Dial in to the master of a run, and serve it until the run or the scheduler wants the node back.

    It stays in the foreground, outlives the master, and finds the next one. SIGTERM is a notice: the run drains the
    node, and this process ends once the node has left.
    """
    line = line or _this_machine()
    if " domain=" not in line and (domain := _domain()):
        line += f" domain={domain}"
    if len(parse_hostfile(line, source="LINE")) != 1:
        raise UsageError(f"{line!r} must name one host")

    from oobleck.runtime.node_process import NodeCall, parse_place, run_node

    if master is not None:
        parse_place(master)
    job = os.environ.get("SLURM_JOB_ID", "")
    origin = os.environ.get("OOBLECK_ORIGIN", f"Slurm's job {job}" if job else "")
    grant = os.environ.get("OOBLECK_GRANT", job)
    call = NodeCall(file=file, line=line, origin=origin, grant=grant, master=master)
    raise SystemExit(run_node(call, tell=lambda text: typer.echo(f"oobleck node: {text}", err=True)))


def _this_machine() -> str:
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    num_devices = os.environ.get("SLURM_GPUS_ON_NODE", "")
    slots = f" slots={num_devices}" if num_devices.isdecimal() and int(num_devices) else ""
    device = os.environ.get("OOBLECK_DEVICE", "")
    return name + slots + (f" device={device}" if device else "")


def _domain() -> str:
    """Return what the scheduler says of the rack or zone that this machine is in; nothing if it does not say."""
    # Slurm's topology plugins name the switches or blocks above a node, and the node last (srun(1)).
    above = os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")[:-1]
    switches = os.environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(above))[: len(above)]
    return os.environ.get("OOBLECK_DOMAIN", "") or ".".join(switches)


def keys(
    directory: Annotated[Path, typer.Argument(help="Where to write master.json and node.json.")],
    *,
    master: Annotated[
        str, typer.Option("--master", metavar="HOST:PORT", help="Where nodes dial in, unless they get another place.")
    ],
) -> None:
    """Make the keys by which a master and its nodes know each other: two files, for `up --keys` and `oobleck node`.

    The master needs both. Nodes need node.json alone, and must not get the other.
    """
    from oobleck.host.user_path import expand_user
    from oobleck.runtime.launchers import make_key_files
    from oobleck.runtime.node_process import parse_place

    parse_place(master)
    typer.echo(f"nodes need {make_key_files(expand_user(directory), master=master)}")
