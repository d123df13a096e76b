"""Wires a run together: coordinator, master, cluster, journal, control socket, and what a person sees.

The composition root of `oobleck up`: the only place that knows both the roles and the real world.
"""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

import trio
from rich.console import Console

from oobleck.control.coordinator import Coordinator
from oobleck.control.events import AddRequested, DrainRequested, End, StopRequested
from oobleck.control.journal import JournalEntry, NodeAdded, NodeLeft, NodeLost, StepDone
from oobleck.control.summary import Summary, summarize
from oobleck.control.view import RunView
from oobleck.errors import NodeUnreachable, UsageError
from oobleck.job import JobSpec, NodeSpec
from oobleck.roles.master import Master
from oobleck.runtime.cluster import RemotePaths, SSHCluster
from oobleck.runtime.control_socket import (
    AddRequest,
    ControlRequest,
    DrainRequest,
    KillRequest,
    StatusRequest,
    StopRequest,
    serve_control,
)
from oobleck.runtime.journal_file import JournalWriter, set_aside
from oobleck.runtime.local_ssh import serve_local_nodes
from oobleck.runtime.profile_files import ProfileFiles
from oobleck.runtime.run_dir import RunDirectory
from oobleck.runtime.ssh import SSHOptions, open_ssh_loop
from oobleck.ui.live import LineLog, run_dashboard, run_lines, wants_dashboard
from oobleck.ui.summary_table import summary_table

from .exit_codes import ExitCode
from .hostfile import parse_hostfile

__all__ = ["Run", "run_job"]

_SPARE_NODES = 4
"""Virtual nodes that are there to be added to a local run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What `oobleck up` was asked for."""

    job: JobSpec
    nodes: tuple[NodeSpec, ...]
    """None for virtual nodes."""
    num_local: int
    kills: tuple[tuple[str, int], ...]
    """(node, step): kill the node once the step is committed."""
    python: str | None
    ssh_config: Path | None
    """Read in place of the user's own."""
    plain: bool
    as_json: bool
    summary: Path | None
    base_dir: Path


def run_job(run: Run) -> int:
    """Run the job to its end; returns the exit code."""
    directory = RunDirectory(base_dir=run.base_dir, tag=run.job.tag)
    directory.create()
    console = Console(stderr=run.as_json)
    if run.plain or not console.is_terminal:
        console.out(f"oobleck up: {run.job.tag}, {run.num_local or len(run.nodes)} nodes, logs in {directory.path}")
    with directory.lock():
        set_aside(directory.journal)
        with JournalWriter(directory.journal) as journal:
            end, summary = trio.run(_run, run, directory, journal, console)
    if summary.generations:  # else nothing was trained, and there is nothing to tell
        console.print(summary_table(summary))
    if run.summary is not None:
        run.summary.write_text(summary.to_json() + "\n", encoding="utf-8")
    if run.as_json:
        print(summary.to_json())  # noqa: T201  the answer
    if end.exit_code != ExitCode.DONE:
        Console(stderr=True).print(f"oobleck: {end.reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    return end.exit_code


async def _run(run: Run, directory: RunDirectory, journal: JournalWriter, console: Console) -> tuple[End, Summary]:
    entries: list[JournalEntry] = []
    async with open_ssh_loop(), _nodes(run) as (known, options), trio.open_nursery() as nursery:
        nodes = known[: run.num_local] if run.num_local else known
        coordinator = Coordinator(
            run.job,
            nodes,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            python_version=platform.python_version(),
        )
        cluster = SSHCluster(
            run.job.tag, known, run_id=directory.run_id, options=options, paths=_remote_paths(run, directory)
        )
        master = Master(
            coordinator,
            tag=run.job.tag,
            cluster=cluster,
            journal=journal,
            profiles=ProfileFiles(directory.profile),
            hello_timeout_s=run.job.control.connect_timeout_s,
        )
        session = _Session(run, master, known, nursery)
        master.observe(entries.append)
        master.observe(session.view.apply)
        master.listen(session.view.heard)
        master.observe(session.kill_when_due)
        await nursery.start(serve_control, directory.control_socket, session.answer)
        nursery.start_soon(session.watch_signals)
        try:
            async with trio.open_nursery() as watching:
                session.show(console, watching)
                end = await master.run()
                watching.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(2):
                await cluster.aclose()
        nursery.cancel_scope.cancel()
    return end, summarize(entries)


@asynccontextmanager
async def _nodes(run: Run) -> AsyncIterator[tuple[tuple[NodeSpec, ...], SSHOptions]]:
    """The nodes and how to reach them; virtual ones live as long as the context."""
    timeout_s = run.job.control.connect_timeout_s
    if run.num_local:
        async with serve_local_nodes(run.num_local + _SPARE_NODES) as (nodes, options):
            yield nodes, options
    else:
        yield run.nodes, SSHOptions(connect_timeout_s=timeout_s, config=run.ssh_config)


def _remote_paths(run: Run, directory: RunDirectory) -> RemotePaths:
    """Virtual nodes share this machine's directories; real ones have their own, under the user's home."""
    base = directory.path.parent if run.num_local else PurePosixPath("~/.oobleck")
    return RemotePaths(
        python=run.python or sys.executable, base_dir=PurePosixPath(base), cache_dir=PurePosixPath(base) / "cache"
    )


class _Session:
    """What reaches a running job from outside: signals, the control socket, and planned kills."""

    def __init__(self, run: Run, master: Master, spares: Sequence[NodeSpec], nursery: trio.Nursery) -> None:
        self.view = RunView()
        self._spares = tuple(spares)
        self._run = run
        self._master = master
        self._nursery = nursery
        self._due = list(run.kills)
        self._gone: set[str] = set()

    def show(self, console: Console, nursery: trio.Nursery) -> None:
        """Start what keeps a person informed."""
        if wants_dashboard(console, plain=self._run.plain):
            nursery.start_soon(lambda: run_dashboard(self.view, console=console, now_s=lambda: self._master.now_s))
        else:
            log = LineLog()
            self._master.observe(log.apply)
            nursery.start_soon(lambda: run_lines(log, console=console))

    def kill_when_due(self, entry: JournalEntry) -> None:
        """Kill the nodes that were to be killed once this step is committed."""
        match entry:
            case NodeLost(node=node) | NodeLeft(node=node):
                self._gone.add(node)
            case NodeAdded(node=spec):
                self._gone.discard(spec.name)
        if not isinstance(entry, StepDone):
            return
        due = [kill for kill in self._due if kill[1] <= entry.record.step]
        self._due = [kill for kill in self._due if kill not in due]
        for node, _ in due:
            self._nursery.start_soon(self._kill, node)

    async def _kill(self, node: str) -> None:
        with suppress(NodeUnreachable):  # gone already, which is what was wanted
            await self._master.kill(node)

    async def watch_signals(self) -> None:
        """Ctrl-C finishes the step and stops, a second one stops at once; SIGTERM counts like the first."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            asked = False
            async for number in signals:
                terminated = number == signal.SIGTERM
                self._master.submit(
                    StopRequested(
                        now=asked,
                        exit_code=ExitCode.TERMINATED if terminated else ExitCode.INTERRUPTED,
                        reason="ended by SIGTERM" if terminated else "ended by Ctrl-C",
                    )
                )
                asked = True

    async def answer(self, request: ControlRequest) -> Mapping[str, object]:
        """Answer a request from another terminal."""
        match request:
            case StatusRequest():
                return self.view.at(self._master.now_s).to_dict()
            case KillRequest(node=node):
                await self._kill_on_request(node)
                return {"killed": node}
            case StopRequest(now=now):
                self._master.submit(StopRequested(now=now, exit_code=ExitCode.DONE, reason="stopped on request"))
                return {"stopping": "now" if now else "after the step in flight"}
            case AddRequest(node=node):
                self._master.submit(AddRequested(spec=self._spec_to_add(node)))
                return {"adding": node}
            case DrainRequest(node=node):
                self._check_living(node)
                self._master.submit(DrainRequested(node=node))
                return {"draining": node}

    async def _kill_on_request(self, node: str) -> None:
        self._check_living(node)
        await self._master.kill(node)

    def _check_living(self, node: str) -> None:
        names = [spec.name for spec in self._master.nodes]
        if node not in names:
            raise UsageError(f"there is no node {node!r}; the nodes are {', '.join(names)}")
        if node in self._gone:
            raise UsageError(f"{node} is lost, or has left, already")

    def _spec_to_add(self, text: str) -> NodeSpec:
        """A node that is known by name, or a new one from a line as in a hostfile."""
        known = {spec.name: spec for spec in (*self._spares, *self._master.nodes)}
        if text in known:
            if text not in self._gone and known[text] in self._master.nodes:
                raise UsageError(f"{text} is in the run already")
            return known[text]
        if self._run.num_local:
            raise UsageError(f"this machine has no virtual node {text!r}; there are {', '.join(known)}")
        specs = parse_hostfile(text, source="the line to add")
        if len(specs) != 1 or specs[0].name in known:
            raise UsageError(f"{text!r} must name one host that is not in the run yet")
        return specs[0]
