"""What every run on nodes begins with: their launcher, where things are on them, and their check."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path, PurePosixPath

from oobleck.cli.inputs import SLOW_FACTOR, NodeSource
from oobleck.control.events import NodeLeftOut, Remark
from oobleck.job import ControlSpec, NodeSpec
from oobleck.runtime.cluster import RemotePaths
from oobleck.runtime.connections import NodeConnections
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.launchers import Launcher
from oobleck.runtime.node_check import check_nodes
from oobleck.runtime.ssh import SSHOptions

from .launching import open_launcher
from .start_check import choose_nodes


def open_nodes(
    source: NodeSource,
    directory: RunDirectory,
    control: ControlSpec,
    *,
    ssh_config: Path | None,
    tell: Callable[[str], None],
    renew_keys: bool = False,
    num_devices: int = 1,
) -> AbstractAsyncContextManager[Launcher]:
    """Where the run's nodes come from; virtual ones live as long as the context."""
    return open_launcher(
        source,
        SSHOptions(connect_timeout_s=control.connect_timeout_s, config=ssh_config),
        keys_directory=directory.path / "dial-in",
        run_id=directory.run_id,
        renew_keys=renew_keys,
        tell=tell,
        environment={"TMPDIR": str(directory.pin_temporary_directory())},
        num_devices=num_devices,
    )


def remote_paths(directory: RunDirectory, launcher: Launcher, python: str | None) -> RemotePaths:
    """Virtual nodes share this machine's directories; real ones have their own, under the user's home."""
    interpreter, home = python or launcher.python, PurePosixPath("~/.oobleck")
    if not launcher.are_virtual:
        return RemotePaths(python=interpreter, base_dir=home, cache_dir=home / "cache")
    base_dir = PurePosixPath(directory.path.parent)
    return RemotePaths(python=interpreter, base_dir=base_dir, cache_dir=PurePosixPath(directory.cache))


async def check_first(
    nodes: tuple[NodeSpec, ...], connections: NodeConnections, paths: RemotePaths, *, leaves_out_slow: bool = False
) -> tuple[tuple[NodeSpec, ...], tuple[NodeLeftOut | Remark, ...]]:
    """Check nodes; returns those to begin with, and what is to be said."""
    report = await check_nodes(
        nodes, connections, python=paths.python, directory=paths.base_dir, slow_factor=SLOW_FACTOR
    )
    return choose_nodes(nodes, report, leaves_out_slow=leaves_out_slow)
