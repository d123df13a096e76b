"""The SSH server of virtual nodes and of nodes that dial in: the master runs commands and connects to UNIX sockets."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import asyncssh
import trio

from oobleck.host.process_group import signal_group
from oobleck.job import NodeSpec
from oobleck.runtime.descriptors import raise_descriptor_limit

from .asyncssh_adapter import await_asyncio, awaitable_by_asyncio, run_on
from .client import SSHOptions
from .login_gate import LOGIN_TIMEOUT_S, LoginGate

_READ_BYTES = 1 << 16
_HOST = "127.0.0.1"
_LOGINS_A_NODE = 8  # as many as `Logins` lets begin at one server
_OTHER_LOGINS = 24


class CommandProcesses:
    """The processes that run commands, which their callers wait for; all other children are orphans."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._num_starting = 0

    @asynccontextmanager
    async def start(self, command: str, environment: Mapping[str, str]) -> AsyncIterator[trio.Process]:
        self._num_starting += 1
        try:
            process = await trio.lowlevel.open_process(
                ["/bin/sh", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C must reach only the master
            )
            self._pids.add(process.pid)
        finally:
            self._num_starting -= 1
        try:
            yield process
        finally:
            self._pids.discard(process.pid)

    def reap_orphans(self) -> None:
        """Reap ended children that are not commands, or some of them; later calls find the rest."""
        while not self._num_starting:  # else a child may be a command whose pid is not known yet
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            # Trio reaps commands itself, and until then the kernel returns the same one again.
            if ended is None or ended.si_pid in self._pids:
                return
            os.waitpid(ended.si_pid, 0)


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
    """Return asyncssh's options to serve callers that have the client key, with the host key.

    Commands run in `nursery`, inherit this process's environment and `environment`, and are listed in `processes`.
    `on_end` receives the error that ended a connection, if any. A client that does not answer for three times
    `keepalive_s` is given up, or never if that is 0.
    """
    processes, environment = processes or CommandProcesses(), {**os.environ, **environment}

    async def run(session: Any) -> None:
        """Run the command of an asyncssh.SSHServerProcess to its end, as a task of `nursery`."""
        done = trio.Event()

        async def run_and_note_end() -> None:
            try:
                async with processes.start(session.command or "true", environment) as process:
                    await _run_command(session, process)
            finally:
                done.set()

        nursery.start_soon(run_and_note_end)
        await done.wait()

    return await await_asyncio(
        asyncssh.SSHServerConnectionOptions.construct,
        server_factory=lambda: _Server(on_end),
        server_host_keys=[host_key],
        authorized_client_keys=asyncssh.import_authorized_keys(client_key.export_public_key().decode()),
        process_factory=awaitable_by_asyncio(run),
        encoding=None,
        login_timeout=login_timeout_s,
        keepalive_interval=keepalive_s,
    )


class _Server(asyncssh.SSHServer):
    """Allows connections to UNIX sockets, besides commands."""

    def __init__(self, on_end: Callable[[Exception | None], None]) -> None:
        self._on_end = on_end

    def unix_connection_requested(self, dest_path: str) -> bool:
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(exc)


async def _run_command(session: Any, process: trio.Process) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_feed, session.stdin, process)
            # The exit status ends the session, so it follows only when both outputs are complete.
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
    """Copy input until its end, and forward signals to the command's process group, as sshd does."""
    assert process.stdin is not None
    with suppress(trio.BrokenResourceError, asyncssh.Error):
        while True:
            try:
                data = await await_asyncio(source.read, _READ_BYTES)
            except asyncssh.SignalReceived as received:
                if process.returncode is None:  # else another process may have its pid by now
                    _signal_group(process.pid, received.signal)
                continue
            if not data:
                break
            await process.stdin.send_all(data)
        await process.stdin.aclose()


def _signal_group(pid: int, name: str) -> None:
    number = getattr(signal, f"SIG{name}", None)
    if isinstance(number, signal.Signals):
        signal_group(pid, number)


async def _pump(source: trio.abc.ReceiveStream, target: Any) -> None:
    with suppress(asyncssh.Error, ConnectionError):
        while data := await source.receive_some(_READ_BYTES):
            target.write(data)
            await await_asyncio(target.drain)  # asyncssh loses what is not drained when the exit is sent


@asynccontextmanager
async def serve_local_nodes(
    count: int, *, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[tuple[NodeSpec, ...], SSHOptions]]:
    """Serve `count` virtual nodes named node0, node1, … on loopback, each on its own port, in place of sshd.

    Yields them and how to reach them, with keys that exist for this run and in memory only. Commands inherit this
    process's environment and `environment`. Enter it within `open_ssh_loop`. Background processes outlive it, as with
    sshd.
    """
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    client_key = asyncssh.generate_private_key("ssh-ed25519")
    async with trio.open_nursery() as commands:
        options = await node_server_options(
            host_key=host_key, client_key=client_key, environment=environment or {}, nursery=commands
        )
        let_in = partial(run_on, asyncssh.run_server, config=None, options=options)
        listeners = [listener for _ in range(count) for listener in await trio.open_tcp_listeners(0, host=_HOST)]
        limit = raise_descriptor_limit() // 3
        gate = LoginGate(let_in, max_logins=min(limit, _OTHER_LOGINS + _LOGINS_A_NODE * count))
        for listener in listeners:
            commands.start_soon(gate.serve, listener)
        nodes = tuple(
            NodeSpec(name=f"node{index}", host=_HOST, port=listener.socket.getsockname()[1], user="oobleck")
            for index, listener in enumerate(listeners)
        )
        reached_by = SSHOptions(
            client_keys=(client_key,), host_keys=(host_key.convert_to_public(),), use_defaults=False
        )
        try:
            yield nodes, reached_by
        finally:
            commands.cancel_scope.cancel()
