"""What every run on nodes begins and ends with: their launcher, their places, their check, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path, PurePosixPath

import trio

from oobleck.cli.inputs import SLOW_FACTOR, NodeSource
from oobleck.control.events import NodeLeftOut, Remark
from oobleck.control.node_check import CheckedNode, CheckReport, Health
from oobleck.control.nodes import saying_farewell_s
from oobleck.errors import ExitCode
from oobleck.job import ControlSpec, NodeSpec
from oobleck.roles.master_ports import LiveCluster
from oobleck.runtime.cluster import RemotePaths
from oobleck.runtime.connections import NodeConnections
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.launchers import Launcher
from oobleck.runtime.node_check import check_nodes
from oobleck.runtime.ssh import SSHOptions

from .launching import open_launcher

ENDS_WELL = (ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
"""The newest state is on disk after these."""

_FORGET_S = 5.0


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
    """Check nodes; returns those to begin with, and what is to be said.

    Virtual nodes are one machine, whose faults all of them would share: nobody checks these.
    """
    report = await check_nodes(
        nodes, connections, python=paths.python, directory=paths.base_dir, slow_factor=SLOW_FACTOR
    )
    return choose_nodes(nodes, report, leaves_out_slow=leaves_out_slow)


def choose_nodes(
    nodes: Sequence[NodeSpec], report: CheckReport, *, leaves_out_slow: bool = False
) -> tuple[tuple[NodeSpec, ...], tuple[NodeLeftOut | Remark, ...]]:
    """Return the nodes to begin with, and what the journal should say.

    Nodes that were reached and found faulty are left out, unless none would be left. A node that was not reached is
    the run's to try again. Slow nodes take part, as they get fewer microbatches, unless they are to be left out.
    """
    reasons = {Health.FAULTY, Health.SLOW} if leaves_out_slow else {Health.FAULTY}
    at_fault = {checked.verdict.node for checked in report.nodes if _is_at_fault(checked, reasons)}
    kept = tuple(spec for spec in nodes if spec.name not in at_fault)
    return kept or tuple(nodes), tuple(_remarks(report, at_fault if kept else set()))


def _is_at_fault(checked: CheckedNode, reasons: Set[Health]) -> bool:
    return checked.facts is not None and checked.verdict.health in reasons


def _remarks(report: CheckReport, left_out: set[str]) -> Iterator[NodeLeftOut | Remark]:
    if report.is_healthy:
        yield Remark(
            level="info", text=f"{len(report.nodes)} nodes are healthy; the check took {report.elapsed_s:.1f} s"
        )
    for link in report.links:
        yield Remark(level="warning", text=f"the link between {' and '.join(link.nodes)} is not healthy: {link.reason}")
    for checked in report.nodes:
        node, verdict = checked.verdict.node, checked.verdict
        if node in left_out:
            yield NodeLeftOut(node=node, fault=verdict.reason)
        elif verdict.health is not Health.HEALTHY:
            yield Remark(level="warning", text=f"{node} is {verdict.health}: {verdict.reason}")


async def give_memory_back(cluster: LiveCluster, nodes: Sequence[NodeSpec], *, keeps_only_copies: bool = False) -> None:
    """Nodes that ended by themselves have done so; lost ones, and those that were just coming back, have not.

    With `keeps_only_copies`, what an agent has left there because it could not be written stays.
    """
    with trio.move_on_after(saying_farewell_s(_FORGET_S, len(nodes))):
        async with trio.open_nursery() as forgetting:
            for spec in nodes:
                forgetting.start_soon(partial(cluster.forget, spec, keeps_only_copy=keeps_only_copies))
