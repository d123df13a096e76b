"""Wires a run together: coordinator, master, cluster, journal, control socket, and what a person sees.

The composition root of `oobleck up`: the only place that knows both the roles and the real world.
"""

from __future__ import annotations

import logging
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
from oobleck.control.remains import Remains, read_remains
from oobleck.control.summary import Summary, summarize
from oobleck.control.view import RunView
from oobleck.errors import ConfigError, NodeUnreachable, UsageError
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
from oobleck.runtime.journal_file import JournalWriter, read_journal, set_aside
from oobleck.runtime.local_ssh import serve_local_nodes
from oobleck.runtime.profile_files import ProfileFiles
from oobleck.runtime.run_dir import RunDirectory
from oobleck.runtime.script_process import CallbackProcess
from oobleck.runtime.ssh import SSHOptions, open_ssh_loop
from oobleck.ui.live import LineLog, run_dashboard, run_lines, wants_dashboard
from oobleck.ui.summary_table import summary_table

from .exit_codes import ExitCode
from .hostfile import parse_hostfile
from .job_file import changed_keys

__all__ = ["Run", "run_job"]

_log = logging.getLogger("oobleck.up")

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
    resume: str = "auto"
    """`auto` takes over a run that goes on without its master, or goes on from the newest checkpoint; `never` starts
    anew; a path names the checkpoint to begin from."""


def run_job(run: Run) -> int:
    """Run the job to its end; returns the exit code."""
    directory = RunDirectory(base_dir=run.base_dir, tag=run.job.tag)
    directory.create()
    console = Console(stderr=run.as_json)
    if run.plain or not console.is_terminal:
        console.out(f"oobleck up: {run.job.tag}, {run.num_local or len(run.nodes)} nodes, logs in {directory.path}")
    with directory.lock():
        end, summary = trio.run(_run, run, directory, console)
    if summary.generations:  # else nothing was trained, and there is nothing to tell
        console.print(summary_table(summary))
    if run.summary is not None:
        run.summary.write_text(summary.to_json() + "\n", encoding="utf-8")
    if run.as_json:
        print(summary.to_json())  # noqa: T201  the answer
    if end.exit_code != ExitCode.DONE:
        Console(stderr=True).print(f"oobleck: {end.reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    return end.exit_code


async def _run(run: Run, directory: RunDirectory, console: Console) -> tuple[End, Summary]:
    async with open_ssh_loop(), _nodes(run) as (known, options), trio.open_nursery() as nursery:
        cluster = SSHCluster(
            run.job.tag, known, run_id=directory.run_id, options=options, paths=_remote_paths(run, directory)
        )
        past = await _find_past(run, directory, cluster, known)
        with JournalWriter(directory.journal) as journal:
            master = _make_master(run, directory, cluster, journal, past, known)
            session = _Session(run, master, known, nursery, past.entries)
            await nursery.start(serve_control, directory.control_socket, session.answer)
            nursery.start_soon(session.watch_signals)
            try:
                async with trio.open_nursery() as watching:
                    session.show(console, watching)
                    callbacks = session.start_callbacks(directory, watching)
                    end = await master.run()
                    if callbacks is not None:
                        callbacks.finish()
                        await callbacks.closed.wait()
                    watching.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(2):
                    await cluster.aclose()
        nursery.cancel_scope.cancel()
    return end, summarize(session.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """What a master before this one has left: its journal, and, where agents live, a run that goes on."""

    entries: tuple[JournalEntry, ...] = ()
    remains: Remains | None = None

    @property
    def elapsed_s(self) -> float:
        """How long the run has gone on. The wall clock may have been set back: time never goes backwards here."""
        if self.remains is None:
            return 0.0
        began = datetime.fromisoformat(self.remains.started.started_at)
        return max(self.remains.last_s, (datetime.now(UTC) - began).total_seconds())


async def _find_past(run: Run, directory: RunDirectory, cluster: SSHCluster, known: Sequence[NodeSpec]) -> _Past:
    """Look for a run that goes on without its master; the journal of any other is set aside.

    Raises UsageError for one that trains another job.
    """
    entries = _read_past(directory.journal) if run.resume == "auto" else ()
    remains = read_remains(entries)
    if remains is not None:
        remains.relocate({spec.name: spec for spec in known})
        if await _is_any_alive(cluster, remains.nodes):
            if remains.job != run.job:
                changed = ", ".join(changed_keys(remains.job, run.job))
                raise UsageError(
                    f"the run {run.job.tag} goes on without its master, and its job differs from this one in "
                    f"{changed}; give the same job to take it over, or --resume never to end it and start anew"
                )
            return _Past(entries=entries, remains=remains)
    set_aside(directory.journal)
    return _Past()


def _read_past(path: Path) -> tuple[JournalEntry, ...]:
    try:
        return tuple(read_journal(path)) if path.exists() else ()
    except ConfigError as error:
        _log.warning("nothing can be taken over: %s", error)  # it may be of another version
        return ()


async def _is_any_alive(cluster: SSHCluster, nodes: Sequence[NodeSpec]) -> bool:
    living: list[NodeSpec] = []

    async def ask(spec: NodeSpec) -> None:
        if await cluster.is_alive(spec):
            living.append(spec)

    async with trio.open_nursery() as asking:
        for spec in nodes:
            asking.start_soon(ask, spec)
    return bool(living)


def _make_master(
    run: Run,
    directory: RunDirectory,
    cluster: SSHCluster,
    journal: JournalWriter,
    past: _Past,
    known: tuple[NodeSpec, ...],
) -> Master:
    coordinator = Coordinator(
        run.job,
        known[: run.num_local] if run.num_local else known,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        python_version=platform.python_version(),
        remains=past.remains,
        resume=run.resume,
    )
    return Master(
        coordinator,
        tag=run.job.tag,
        cluster=cluster,
        journal=journal,
        profiles=ProfileFiles(directory.profile),
        hello_timeout_s=run.job.control.connect_timeout_s,
        elapsed_s=past.elapsed_s,
    )


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

    def __init__(
        self,
        run: Run,
        master: Master,
        spares: Sequence[NodeSpec],
        nursery: trio.Nursery,
        past: Sequence[JournalEntry],
    ) -> None:
        """`past` is the journal of a master before this one."""
        self.entries: list[JournalEntry] = []
        self.view = RunView()
        self._spares = tuple(spares)
        self._run = run
        self._master = master
        self._nursery = nursery
        self._due = list(run.kills)
        self._gone: set[str] = set()
        for entry in past:
            self._note(entry)
            self._take_due(entry)  # those kills are done
        master.observe(self._note)
        master.observe(self._kill_when_due)
        master.listen(self.view.heard)

    def start_callbacks(self, directory: RunDirectory, nursery: trio.Nursery) -> CallbackProcess | None:
        """Start what runs the script's callbacks, if it has any."""
        script = self._run.job.script
        if script is None or "callbacks" not in script.provides:
            return None
        stop = StopRequested(now=False, exit_code=ExitCode.DONE, reason="a callback wanted training to stop")
        process = CallbackProcess(
            self._run.job, log=directory.path / "script.log", on_stop=lambda: self._master.submit(stop)
        )
        self._master.observe(process.tell)
        nursery.start_soon(process.run)
        return process

    def show(self, console: Console, nursery: trio.Nursery) -> None:
        """Start what keeps a person informed."""
        if wants_dashboard(console, plain=self._run.plain):
            nursery.start_soon(lambda: run_dashboard(self.view, console=console, now_s=lambda: self._master.now_s))
        else:
            log = LineLog()
            self._master.observe(log.apply)
            nursery.start_soon(lambda: run_lines(log, console=console))

    def _note(self, entry: JournalEntry) -> None:
        self.entries.append(entry)
        self.view.apply(entry)
        match entry:
            case NodeLost(node=node) | NodeLeft(node=node):
                self._gone.add(node)
            case NodeAdded(node=spec):
                self._gone.discard(spec.name)

    def _take_due(self, entry: JournalEntry) -> list[str]:
        """The nodes that are to be killed once this step is committed."""
        if not isinstance(entry, StepDone):
            return []
        due = [kill for kill in self._due if kill[1] <= entry.record.step]
        self._due = [kill for kill in self._due if kill not in due]
        return [node for node, _ in due]

    def _kill_when_due(self, entry: JournalEntry) -> None:
        for node in self._take_due(entry):
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
