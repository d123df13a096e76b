"""`oobleck check`: are the nodes fit to train on?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from oobleck.errors import UsageError
from oobleck.exit_codes import ExitCode
from oobleck.json_table import to_json

from .inputs import SLOW_FACTOR, BaseDirOption, JsonOption, PythonOption, SSHConfigOption, base_dir_of
from .up import read_nodes, readable_file

if TYPE_CHECKING:
    from oobleck.control.node_check import CheckReport
    from oobleck.job import NodeSpec

__all__ = ["check"]

_MAX_SLOWNESS = 1e6


def check(
    hostfile: Annotated[Path | None, typer.Argument(help="Nodes to check, one per line.", show_default=False)] = None,
    local: Annotated[
        int | None, typer.Option("--local", metavar="N", help="Check N virtual nodes of this machine.")
    ] = None,
    python: PythonOption = None,
    ssh_config: SSHConfigOption = None,
    slow_factor: Annotated[
        float,
        typer.Option("--slow-factor", metavar="X", help="A node this many times slower than the others is slow."),
    ] = SLOW_FACTOR,
    as_json: JsonOption = False,
    base_dir: BaseDirOption = None,
) -> None:
    """Test every node alone, then in pairs, and name the faulty or slow ones (never their partners).

    Looks at SSH, versions, devices, disk and clock; measures a matrix product, memory, disk, loopback, and exchanges
    between nodes. The exit status is 0 only when all nodes and links are healthy, else 1.
    """
    if not 1 < slow_factor <= _MAX_SLOWNESS:
        raise UsageError(
            f"--slow-factor: {slow_factor:g} is not possible; it must be more than 1, and {_MAX_SLOWNESS:,.0f} at most"
        )
    nodes = read_nodes(hostfile, local)
    config = readable_file(ssh_config, "ssh config") if ssh_config is not None else None

    import trio
    from rich.console import Console

    from oobleck.runtime.processes import PatientClock
    from oobleck.ui.check_table import check_table

    def tell(text: str) -> None:
        if not as_json:
            typer.echo(f"oobleck check: {text}", err=True)

    report = trio.run(
        _check,
        nodes,
        local or 0,
        config,
        python or sys.executable,
        base_dir_of(base_dir).absolute(),
        slow_factor,
        tell,
        clock=PatientClock(),
    )
    if as_json:
        typer.echo(to_json(report.to_dict(), indent=2))
    else:
        Console().print(check_table(report))
    raise SystemExit(ExitCode.DONE if report.is_healthy else ExitCode.FAILED)


async def _check(
    nodes: tuple[NodeSpec, ...],
    num_local: int,
    ssh_config: Path | None,
    python: str,
    base_dir: Path,
    slow_factor: float,
    tell: Callable[[str], None],
) -> CheckReport:
    from oobleck.runtime.node_check import check_nodes
    from oobleck.runtime.ssh import SSHOptions, open_ssh_loop, serve_local_nodes

    async with open_ssh_loop():
        if not num_local:
            options = SSHOptions(config=ssh_config)
            directory = PurePosixPath("~/.oobleck")
            return await check_nodes(
                nodes, options, python=python, directory=directory, slow_factor=slow_factor, tell=tell
            )
        async with serve_local_nodes(num_local) as (virtual, options):
            directory = PurePosixPath(base_dir)
            return await check_nodes(
                virtual, options, python=python, directory=directory, slow_factor=slow_factor, tell=tell
            )
