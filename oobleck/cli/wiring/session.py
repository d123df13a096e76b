"""Carries requests of other terminals, signals and planned kills into a running job."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import assert_never

import trio

from oobleck.cli.control import request_of
from oobleck.control import events, journal
from oobleck.control.replay import RunBooks
from oobleck.errors import ExitCode, NodeUnreachable, UsageError
from oobleck.host.streams import Output
from oobleck.job import NodeSpec
from oobleck.roles.master import Master
from oobleck.roles.master_ports import LiveCluster
from oobleck.runtime import control_client
from oobleck.runtime.control_socket import serve_control
from oobleck.runtime.launchers import Arrived, Launcher, Leaving, NodeChange, OutOfMemory, Reported
from oobleck.ui import live
from oobleck.ui.terminal import KeyReader
from oobleck.wire import to_builtins

_log = logging.getLogger("oobleck.up")


class MasterLeaves(Exception):
    """Raised to end this process alone: training continues without a master, and the next one takes over."""


class Session:
    """Shows the journal, and turns requests from outside into events and signals. It decides nothing."""

    def __init__(
        self,
        master: Master,
        cluster: LiveCluster,
        launcher: Launcher,
        nursery: trio.Nursery,
        *,
        kills: Sequence[tuple[str, int]],
        past: RunBooks,
        is_replaced: bool = False,
    ) -> None:
        """`past` are the books of the previous master's journal."""
        self.account = past.account
        self.view = past.view
        self._master = master
        self._cluster = cluster
        self._launcher = launcher
        self._nursery = nursery
        self._is_replaced = is_replaced
        # An earlier master has carried out the kills up to this step.
        self._due = [kill for kill in kills if kill[1] > past.furthest_step]
        self._waiting_kills = list(self._due)  # until their nodes are lost
        self._gone = set(past.gone_nodes)
        self._terminal: Output | None = None
        self._started: journal.JobStarted | None = past.started
        self._formatter = live.LineFormatter()
        if past.started is not None:
            self._formatter.apply(past.started)  # so that its line is not printed again
        master.observe(self._note)
        master.observe(self._kill_when_due)
        master.listen(self.view.heard)
        master.measure(lambda node, use: self.view.measured(node, use, master.now_s))

    async def serve(self, socket: Path, remarks: Sequence[events.NodeLeftOut | events.Remark]) -> None:
        """Listen on the control socket, then follow signals and the launcher; put the remarks into the journal."""
        # `start` returns once the socket listens, so other commands reach the run from its first entry on.
        await self._nursery.start(serve_control, socket, self.answer)
        await self._nursery.start(self.watch_signals)  # a signal that came first would end this process and no rank
        self._nursery.start_soon(self.follow_launcher)
        for remark in remarks:
            self._master.submit(remark)

    def show(self, output: Output, nursery: trio.Nursery, *, plain: bool) -> None:
        """Start the dashboard or the plain lines. The run continues if they cannot be written."""
        self._terminal = output if output.isatty() else None
        if live.wants_dashboard(live.console_on(output), plain=plain):
            nursery.start_soon(self._draw, output)
        else:
            nursery.start_soon(self._lines_from_now_on(output))
        nursery.start_soon(live.tell_of_lost_output, output, self._note_lost_output)

    async def _draw(self, output: Output) -> None:
        """Draw the dashboard; once the user leaves it, print lines instead."""
        keys = KeyReader(0) if os.isatty(0) else None
        has_quit = await live.run_dashboard(
            lambda: self.view.at(self._master.now_s),
            output=output,
            act=lambda wish: self.answer(request_of(wish)),
            keys=keys,
        )
        if has_quit:
            if self._started is not None:
                self._formatter.apply(self._started)
            await self._lines_from_now_on(output)()

    def _lines_from_now_on(self, output: Output) -> Callable[[], Awaitable[None]]:
        """Return a task that prints a line for each entry after this call."""
        log = live.LineLog(self._formatter)
        self._master.observe(log.apply)
        return lambda: live.run_lines(log, output=output)

    def _note_lost_output(self, reason: str) -> None:
        text = f"output cannot be written ({reason}); the run continues without it, and `oobleck status` shows it"
        self.remark("warning", text)
        _log.warning("%s", text)

    def _note(self, entry: journal.JournalEntry) -> None:
        self.account.apply(entry)
        self.view.apply(entry)
        match entry:
            case journal.JobStarted():
                self._started = entry
            case journal.NodeLost(node=node):
                self._gone.add(node)
                self._waiting_kills = [kill for kill in self._waiting_kills if kill[0] != node]
            case journal.JobEnded():
                for node, step in self._waiting_kills:
                    _log.warning("--kill %s@%d was not carried out: the run ended first", node, step)
            case journal.NodeLeft(node=node):
                self._gone.add(node)
                # A lost node may return, so only one that has left is given back.
                self._cluster.release(self._spec(node))
            case journal.NodeAdded(node=spec):
                self._gone.discard(spec.name)

    def _kill_when_due(self, entry: journal.JournalEntry) -> None:
        if not isinstance(entry, journal.StepDone):
            return
        due = [kill for kill in self._due if kill[1] <= entry.record.step]
        self._due = [kill for kill in self._due if kill not in due]
        for node, _ in due:
            self._nursery.start_soon(self._kill, node)

    async def _kill(self, node: str) -> None:
        with suppress(NodeUnreachable):  # it is gone already
            await self._master.kill(node)

    async def watch_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stop the run after the step on Ctrl-C or SIGTERM, and at once on a second one.

        The end of the terminal (SIGHUP) stops nothing. Raises MasterLeaves on SIGTERM to a master that is replaced.
        """
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *_hangup()) as signals:
            task_status.started()
            asked = False
            async for number in signals:
                if number == signal.SIGHUP:
                    self.remark("warning", "the terminal is gone; the run continues, and `oobleck stop` ends it")
                    if self._terminal is not None:
                        self._terminal.is_lost = True  # a write to it may never return
                    continue
                terminated = number == signal.SIGTERM
                # The sender of the signal starts another master in its place, and the agents train on until then.
                if terminated and self._is_replaced:
                    raise MasterLeaves
                self._master.submit(
                    events.StopRequested(
                        now=asked,
                        exit_code=ExitCode.TERMINATED if terminated else ExitCode.INTERRUPTED,
                        reason="ended by SIGTERM" if terminated else "ended by Ctrl-C",
                    )
                )
                asked = True

    async def answer(self, request: control_client.ControlRequest) -> Mapping[str, object]:
        match request:
            case control_client.StatusRequest():
                snapshot = to_builtins(self.view.at(self._master.now_s))
                assert isinstance(snapshot, dict)
                return snapshot
            case control_client.KillRequest(node=node):
                self._check_living(node)
                if not await self._master.kill(node):
                    raise UsageError(
                        f"{node} has no process of this run that can be killed; `oobleck status` shows its state"
                    )
                return {"killed": node}
            case control_client.StopRequest(now=now):
                self._master.submit(events.StopRequested(now=now, exit_code=ExitCode.DONE, reason="stopped on request"))
                return {"stopping": "now" if now else "after the step in flight"}
            case control_client.AllowRequest(step=step, through=through):
                self._master.submit(events.ScriptAnswered(step=step, through=through))
                return {"allowed": through}
            case control_client.AddRequest(node=node):
                self._master.submit(events.AddRequested(spec=self._spec_to_add(node)))
                return {"adding": node}
            case control_client.DrainRequest(node=node):
                self._check_living(node)
                self._master.submit(events.DrainRequested(node=node))
                return {"draining": node}
            case control_client.SignalRequest():
                return await self._signal(request)
            case control_client.SlowRequest():
                return await self._slow(request)
            case control_client.ListLogsRequest() | control_client.ReadLogRequest():
                return await self._logs(request)

    async def _logs(
        self, request: control_client.ListLogsRequest | control_client.ReadLogRequest
    ) -> Mapping[str, object]:
        spec = self._spec(request.node)
        if isinstance(request, control_client.ListLogsRequest):
            return {"logs": await self._cluster.list_logs(spec)}
        part = await self._cluster.read_log(spec, request.name, request.offset)
        return {"text": part.decode("latin-1")}

    async def _signal(self, request: control_client.SignalRequest) -> Mapping[str, object]:
        spec = self._spec(request.node)
        which = "all processes" if request.processes == "*" else request.processes
        if not await self._cluster.signal(spec, request.signal, request.processes):
            raise UsageError(f"{request.node} has no living process of this run to send SIG{request.signal} to")
        self.remark("info", f"on request: SIG{request.signal} to {which} of {request.node}")
        return {"signalled": request.node}

    async def _slow(self, request: control_client.SlowRequest) -> Mapping[str, object]:
        if not await self._cluster.slow(self._spec(request.node), request.factor):
            raise UsageError(f"{request.node} has no living process of this run")
        self.remark("info", f"on request: {request.node} takes {request.factor:g} times as long")
        return {"slowed": request.node}

    def tell_of_gap(self, gap: journal.JournalGap) -> None:
        """Note in the journal what it could not take."""
        self.remark("error" if gap.is_open or gap.num_lost else "info", gap.sentence)

    def remark(self, level: str, text: str) -> None:
        """Write a sentence for people into the journal."""
        self._master.submit(events.Remark(level=level, text=text))

    def _spec(self, node: str) -> NodeSpec:
        known = {spec.name: spec for spec in self._master.nodes}
        if node not in known:
            raise UsageError(f"there is no node {node!r}; the nodes are {', '.join(known)}")
        return known[node]

    def _check_living(self, node: str) -> None:
        self._spec(node)
        if node in self._gone:
            raise UsageError(f"{node} is lost or has left already")

    async def follow_launcher(self) -> None:
        """Add nodes that arrive, and drain those that leave, until cancelled."""
        reported, changes = trio.open_memory_channel[NodeChange](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._launcher.follow, reported)
            async for change in changes:
                match change:
                    case Arrived(node=spec, by_itself=by_itself):
                        self._master.submit(events.AddRequested(spec=spec, by_itself=by_itself, has_arrived=True))
                    case Leaving(node=node):
                        self._master.submit(events.DrainRequested(node=node))
                    case OutOfMemory(node=node):
                        self._master.submit(events.MemoryRanOut(node=node))
                    case Reported(level=level, text=text):
                        self.remark(level, text)
                    case _:
                        assert_never(change)

    def _spec_to_add(self, text: str) -> NodeSpec:
        known = {spec.name: spec for spec in self._master.nodes}
        # The run may have gone on with fewer of a node's devices than it has.
        whole = known | {spec.name: spec for spec in self._launcher.nodes}
        spec = whole[text] if text in known else self._launcher.named(text)
        if spec.name in known and spec.name not in self._gone:
            raise UsageError(f"{spec.name} is in the run already")
        return spec


def _hangup() -> tuple[signal.Signals, ...]:
    """Return SIGHUP, unless our parent (such as nohup) ignores it."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
