"""What every run does with its nodes at its beginning and its end: reach them, check them, free their memory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import trio
from rich.console import Console

from oobleck.cli.inputs import SLOW_FACTOR, NodeSource
from oobleck.control.events import NodeLeftOut, Remark
from oobleck.control.node_check import CheckReport, Health
from oobleck.control.nodes import saying_farewell_s
from oobleck.errors import ExitCode
from oobleck.host.machine import num_gpus
from oobleck.job import ControlSpec, NodeSpec
from oobleck.roles.master_ports import LiveCluster
from oobleck.runtime.cluster import RemotePaths, SSHCluster
from oobleck.runtime.connections import NodeConnections
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.launchers import Launcher
from oobleck.runtime.node_check import check_nodes
from oobleck.runtime.ssh import SSHOptions, open_ssh_loop
from oobleck.runtime.workdir import Workdir

from .launching import open_launcher

ENDS_WELL = (ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
"""After these, the newest state is on disk."""

_FORGET_S = 5.0
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNodes:
    launcher: Launcher
    cluster: SSHCluster
    connections: NodeConnections
    paths: RemotePaths
    are_checked: bool

    async def begin(
        self, say: Callable[[str], None], *, waits: bool, is_check_due: bool = True, leaves_out_slow: bool = False
    ) -> tuple[tuple[NodeSpec, ...], tuple[NodeSpec, ...], tuple[NodeLeftOut | Remark, ...]]:
        """Wait for the nodes, and check them; return all, those to begin with, and what the journal should say."""
        known = await self.launcher.begin(waits=waits)
        if not (self.are_checked and is_check_due):
            return known, known, ()
        say(f"checking {len(known)} nodes")
        report = await check_nodes(
            known,
            self.connections,
            python=self.paths.python,
            directory=self.paths.base_dir,
            slow_factor=SLOW_FACTOR,
        )
        return known, *choose_nodes(known, report, leaves_out_slow=leaves_out_slow)


@asynccontextmanager
async def open_nodes(
    source: NodeSource,
    directory: RunDirectory,
    control: ControlSpec,
    *,
    python: str | None,
    ssh_config: Path | None,
    checks: bool,
    tell: Callable[[str], None],
    renew_keys: bool = False,
    num_devices: int = 1,
    runs_ranks: bool = False,
    variables: Iterable[str] = (),
    workdir: Workdir | None = None,
) -> AsyncIterator[RunNodes]:
    """Open the launcher of a run's nodes, and the cluster on it; virtual nodes live as long as the context.

    Nodes get these variables of this process's environment, and `workdir`.
    """
    launching = open_launcher(
        source,
        SSHOptions(connect_timeout_s=control.connect_timeout_s, config=ssh_config),
        keys_directory=directory.path / "dial-in",
        run_id=directory.run_id,
        renew_keys=renew_keys,
        tell=tell,
        environment={"TMPDIR": str(directory.pin_temporary_directory())},
        num_devices=num_devices,
        num_gpus=0 if runs_ranks else num_gpus(),  # all ranks see all GPUs
    )
    # Connections need the loop until they are closed, so it is opened first and closed last.
    async with open_ssh_loop(), launching as launcher:
        # Virtual nodes have all of this environment.
        environment = {} if launcher.are_virtual else {name: os.environ[name] for name in variables}
        paths, connections = _remote_paths(directory, launcher, python), NodeConnections(launcher, environment)
        # Virtual nodes are one machine, whose faults all of them would share.
        are_checked = checks and not launcher.are_virtual
        cluster = SSHCluster(
            directory.tag,
            launcher.nodes,
            run_id=directory.run_id,
            connections=connections,
            paths=paths,
            start_timeout_s=control.start_timeout_s,
            checks_returning=are_checked,
            runs_ranks=runs_ranks,
            workdir=workdir,
        )
        try:
            yield RunNodes(
                launcher=launcher, cluster=cluster, connections=connections, paths=paths, are_checked=are_checked
            )
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(_CLOSE_S):
                await cluster.aclose()


def _remote_paths(directory: RunDirectory, launcher: Launcher, python: str | None) -> RemotePaths:
    # Virtual nodes share this machine's directories; real ones have their own, below the user's home.
    interpreter, home = python or launcher.python, PurePosixPath("~/.oobleck")
    if not launcher.are_virtual:
        return RemotePaths(python=interpreter, base_dir=home, cache_dir=home / "cache")
    base_dir = PurePosixPath(directory.path.parent)
    return RemotePaths(python=interpreter, base_dir=base_dir, cache_dir=PurePosixPath(directory.cache))


def choose_nodes(
    nodes: Sequence[NodeSpec], report: CheckReport, *, leaves_out_slow: bool = False
) -> tuple[tuple[NodeSpec, ...], tuple[NodeLeftOut | Remark, ...]]:
    """Return the nodes to begin with, and what the journal should say."""
    # Slow nodes can take part, because they get fewer microbatches.
    reasons = {Health.FAULTY, Health.SLOW} if leaves_out_slow else {Health.FAULTY}
    # The run itself retries nodes that were not reached.
    reached = [checked.verdict for checked in report.nodes if checked.facts is not None]
    at_fault = {verdict.node for verdict in reached if verdict.health in reasons}
    kept = tuple(spec for spec in nodes if spec.name not in at_fault)
    # If none would remain, all take part: a run with faulty nodes may still work.
    return kept or tuple(nodes), tuple(_remarks(report, at_fault if kept else set()))


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
    """Free the shared memory of lost nodes, and of those that were just coming back; all others have done so.

    With `keeps_only_copies`, states that an agent could not write to disk stay.
    """
    with trio.move_on_after(saying_farewell_s(_FORGET_S, len(nodes))):
        async with trio.open_nursery() as forgetting:
            for spec in nodes:
                forgetting.start_soon(partial(cluster.forget, spec, keeps_only_copy=keeps_only_copies))


def complain(text: str, *, style: str = "") -> None:
    """Print a line to standard error, however long it is."""
    Console(stderr=True).print(f"oobleck: {text}", style=style, markup=False, highlight=False, soft_wrap=True)
