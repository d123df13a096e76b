"""What a node lets its master do over SSH, in a process of ours: run commands, and connect to UNIX sockets.

It is the server of virtual nodes, and that of a node which dials in.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncssh
import trio

from .asyncssh_adapter import await_asyncio, awaitable_by_asyncio

_READ_BYTES = 1 << 16
LOGIN_TIMEOUT_S = 10.0
"""How long the other side may take to show its key; asyncssh alone would wait for two minutes."""


class CommandProcesses:
    """The processes that run commands. Each is waited for; other children are orphans, and nobody waits for those."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._num_starting = 0

    @asynccontextmanager
    async def start(self, command: str, environment: Mapping[str, str]) -> AsyncIterator[trio.Process]:
        """Run a command in a shell; the caller waits for its end within the context."""
        self._num_starting += 1
        try:
            process = await trio.lowlevel.open_process(
                ["/bin/sh", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C is for the master alone
            )
            self._pids.add(process.pid)
        finally:
            self._num_starting -= 1
        try:
            yield process
        finally:
            self._pids.discard(process.pid)

    def reap_orphans(self) -> None:
        """Have the kernel forget children that have ended and that are no commands; a later call finds the others."""
        while not self._num_starting:  # else a child may be a command that is not known yet
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in self._pids:
                return
            os.waitpid(found.si_pid, 0)


async def node_server_options(
    *,
    host_key: asyncssh.SSHKey,
    client_key: asyncssh.SSHKey,
    environment: Mapping[str, str],
    nursery: trio.Nursery,
    on_end: Callable[[Exception | None], None] = lambda error: None,
    processes: CommandProcesses | None = None,
    keepalive_s: float = 0.0,
    login_timeout_s: float = LOGIN_TIMEOUT_S,
) -> asyncssh.SSHServerConnectionOptions:
    """Options for asyncssh by which a node serves a caller that has the client key, and shows the host key.

    Commands run in `nursery`, and find `environment` beside our own; `processes` has those that do. `on_end` is told
    how a connection ended. A client that does not answer for three times `keepalive_s` is gone; 0 waits for ever.
    """
    runner = _CommandRunner(nursery, {**os.environ, **environment}, processes or CommandProcesses())
    return await await_asyncio(
        asyncssh.SSHServerConnectionOptions.construct,
        server_factory=lambda: _Server(on_end),
        server_host_keys=[host_key],
        authorized_client_keys=asyncssh.import_authorized_keys(client_key.export_public_key().decode()),
        process_factory=awaitable_by_asyncio(runner.run),
        encoding=None,
        login_timeout=login_timeout_s,
        keepalive_interval=keepalive_s,
    )


class _Server(asyncssh.SSHServer):
    """Lets the run's own key do what agents need: commands, and connections to UNIX sockets."""

    def __init__(self, on_end: Callable[[Exception | None], None]) -> None:
        self._on_end = on_end

    def unix_connection_requested(self, dest_path: str) -> bool:
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(exc)


class _CommandRunner:
    """Runs the commands of SSH sessions as processes of trio's, each in the nursery given."""

    def __init__(self, nursery: trio.Nursery, environment: Mapping[str, str], processes: CommandProcesses) -> None:
        self._nursery = nursery
        self._environment = environment
        self._processes = processes

    async def run(self, session: Any) -> None:
        """Run one session's command to its end. `session` is an asyncssh.SSHServerProcess."""
        done = trio.Event()

        async def run_then_tell() -> None:
            try:
                async with self._processes.start(session.command or "true", self._environment) as process:
                    await _run_command(session, process)
            finally:
                done.set()

        self._nursery.start_soon(run_then_tell)
        await done.wait()


async def _run_command(session: Any, process: trio.Process) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_feed, session.stdin, process)
            async with trio.open_nursery() as outputs:
                outputs.start_soon(_pump, process.stdout, session.stdout)
                outputs.start_soon(_pump, process.stderr, session.stderr)
            status = await process.wait()
            nursery.cancel_scope.cancel()
        session.exit(status if status >= 0 else 128 - status)
    finally:
        if process.returncode is None:
            _signal_group(process.pid, "KILL")
            with trio.CancelScope(shield=True):
                await process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            await trio.aclose_forcefully(stream)


async def _feed(source: Any, process: trio.Process) -> None:
    """Copy input until its end, and pass signals on to all that the command has started, as sshd does."""
    assert process.stdin is not None
    with suppress(trio.BrokenResourceError, asyncssh.Error):
        while True:
            try:
                data = await await_asyncio(source.read, _READ_BYTES)
            except asyncssh.SignalReceived as received:
                if process.returncode is None:  # else its number may be another's by now
                    _signal_group(process.pid, received.signal)
                continue
            if not data:
                break
            await process.stdin.send_all(data)
        await process.stdin.aclose()


def _signal_group(pid: int, name: str) -> None:
    number = getattr(signal, f"SIG{name}", None)
    if isinstance(number, signal.Signals):
        with suppress(ProcessLookupError):
            os.killpg(pid, number)


async def _pump(source: trio.abc.ReceiveStream, target: Any) -> None:
    """Copy output; drained before the exit is sent, or asyncssh would lose it."""
    with suppress(asyncssh.Error, ConnectionError):
        while data := await source.receive_some(_READ_BYTES):
            target.write(data)
            await await_asyncio(target.drain)
