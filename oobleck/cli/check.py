"""`oobleck check`: tests whether nodes are fit to train on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import typer

from oobleck.errors import ExitCode, UsageError
from oobleck.json_table import to_json

from . import inputs
from .common_options import BaseDirOption, JsonOption, base_dir_of
from .option_fields import argument, option, takes_options

if TYPE_CHECKING:
    from oobleck.control.node_check import CheckReport
    from oobleck.runtime.launchers import Launcher

_MAX_SLOWNESS = 1e6
_CLOSE_S = 2.0
# Nodes that dial in need a directory for their keys; it stands next to those of runs.
_TAG = "check"


@dataclass(frozen=True, kw_only=True)
class _Nodes(inputs.NodeOptions):
    local: int | None = option("--local", "N", "Check N virtual nodes of this machine.")
    # A check asks for the nodes only once.
    hosts_every: None = None


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    hostfile: Path | None = argument("HOSTFILE", "Nodes to check, one per line.")
    nodes: _Nodes
    reach: inputs.ReachOptions
    slow_factor: float = option(
        "--slow-factor", "X", "A node this many times slower than the others is slow.", default=inputs.SLOW_FACTOR
    )
    as_json: JsonOption = False
    base_dir: BaseDirOption = None


@takes_options(CheckOptions)
def check(options: CheckOptions) -> None:
    """Test every node alone, then in pairs, and name the faulty or slow ones (never their partners).

    It looks at SSH, versions, devices, disk and clock, and measures a matrix product, memory, disk, loopback, and
    exchanges between nodes. The exit status is 0 if all nodes and links are healthy, else 1.
    """
    if not 1 < options.slow_factor <= _MAX_SLOWNESS:
        raise UsageError(
            f"--slow-factor: {options.slow_factor:g} is not possible; it must be more than 1, and "
            f"{_MAX_SLOWNESS:,.0f} at most"
        )
    source = inputs.read_source(options.hostfile, options.nodes)
    config = options.reach.read_config()

    import trio
    from rich.console import Console

    from oobleck.runtime.patient_clock import PatientClock
    from oobleck.ui.check_table import check_table

    report = trio.run(_check, options, source, config, clock=PatientClock())
    if options.as_json:
        typer.echo(to_json(report.to_dict(), indent=2))
    else:
        Console().print(check_table(report))
    num_missing = len(source.names) - len(report.nodes)
    if num_missing > 0:
        _say(f"{num_missing} of {len(source.names)} nodes have not dialled in, and were not checked")
    raise SystemExit(ExitCode.DONE if report.is_healthy and num_missing <= 0 else ExitCode.FAILED)


def _say(text: str) -> None:
    typer.echo(f"oobleck check: {text}", err=True)


async def _check(options: CheckOptions, source: inputs.NodeSource, ssh_config: Path | None) -> CheckReport:
    """Check the nodes of a source; with `--json`, without progress on stderr."""
    import trio

    from oobleck.cli.wiring import open_launcher
    from oobleck.runtime.connections import NodeConnections
    from oobleck.runtime.files import RunDirectory
    from oobleck.runtime.node_check import check_nodes
    from oobleck.runtime.ssh import SSHOptions, open_ssh_loop

    base_dir = base_dir_of(options.base_dir).absolute()
    known = RunDirectory(base_dir=base_dir, tag=_TAG)  # for nodes that dial in: their keys and their names
    if isinstance(source, inputs.DialIn | inputs.FromSlurm | inputs.FromRay):
        known.create()
    async with (
        open_ssh_loop(),
        open_launcher(
            source,
            SSHOptions(config=ssh_config),
            keys_directory=known.path / "dial-in",
            run_id=known.run_id,
            tell=_say,
            num_spare=0,
        ) as launcher,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_say_reports, launcher)
        connections = NodeConnections(launcher)
        try:
            nodes = await launcher.begin()
            report = await check_nodes(
                nodes,
                connections,
                python=options.reach.python or launcher.python,
                directory=PurePosixPath(base_dir if launcher.are_virtual else "~/.oobleck"),
                slow_factor=options.slow_factor,
                tell=(lambda text: None) if options.as_json else _say,
            )
            if not (isinstance(source, inputs.DialIn) and source.keys is not None):  # else they wait for their run
                for node in nodes:
                    await launcher.release(node)
            nursery.cancel_scope.cancel()
            return report
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(_CLOSE_S):
                await connections.aclose()


async def _say_reports(launcher: Launcher) -> None:
    """Print the launcher's reports until cancelled. Nodes that join meanwhile are not checked."""
    import trio

    from oobleck.runtime.launchers import NodeChange, Reported

    reported, changes = trio.open_memory_channel[NodeChange](0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(launcher.follow, reported)
        async for change in changes:
            if isinstance(change, Reported):
                _say(change.text)
