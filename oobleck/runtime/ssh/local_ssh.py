"""An SSH server for virtual nodes on this machine, in place of sshd.

Everything else is as with real hosts: the same connections, agents and sockets. Its keys are made for one run, are
kept in memory, and die with it. It listens on loopback only, one port for each virtual node.

Any user of this machine can connect to a port of loopback. Who does so without the key holds a descriptor, so that
few may, and not for long; asyncssh alone would let them wait for two minutes, and end with the last descriptor.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncssh
import trio

from oobleck.job import NodeSpec
from oobleck.runtime.descriptors import raise_descriptor_limit
from oobleck.runtime.listening import accept

from .asyncssh_adapter import await_asyncio, awaitable_by_asyncio
from .client import SSHOptions

__all__ = ["serve_local_nodes"]

_HOST = "127.0.0.1"
_READ_BYTES = 1 << 16
_LOGIN_TIMEOUT_S = 10.0
_LOGINS_A_NODE = 8
"""As many as `logins.py` lets begin at one server."""
_OTHER_LOGINS = 24


@asynccontextmanager
async def serve_local_nodes(
    count: int, *, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[tuple[NodeSpec, ...], SSHOptions]]:
    """Serve `count` virtual nodes, node0 and on; yields them and how to reach them.

    Commands find `environment` there, beside our own.

    Must be entered within `open_ssh_loop`. What commands have started and put into the background outlives it,
    as with sshd.
    """
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    client_key = asyncssh.generate_private_key("ssh-ed25519")
    authorized = asyncssh.import_authorized_keys(client_key.export_public_key().decode())
    async with trio.open_nursery() as commands:
        runner = _CommandRunner(commands, {**os.environ, **(environment or {})})
        options = await await_asyncio(
            asyncssh.SSHServerConnectionOptions.construct,
            server_factory=_Server,
            server_host_keys=[host_key],
            authorized_client_keys=authorized,
            process_factory=awaitable_by_asyncio(runner.run),
            encoding=None,
            login_timeout=_LOGIN_TIMEOUT_S,
        )
        listeners = [listener for _ in range(count) for listener in await trio.open_tcp_listeners(0, host=_HOST)]
        limit = raise_descriptor_limit() // 3
        doorkeeper = _Doorkeeper(options, max_logins=min(limit, _OTHER_LOGINS + _LOGINS_A_NODE * count))
        for listener in listeners:
            commands.start_soon(doorkeeper.serve, listener)
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


class _Doorkeeper:
    """Takes connections in. Of too many that have not yet shown the key, the oldest goes: it had the most time."""

    def __init__(self, options: asyncssh.SSHServerConnectionOptions, *, max_logins: int) -> None:
        self._options = options
        self._max_logins = max_logins
        self._logins: dict[trio.CancelScope, None] = {}

    async def serve(self, listener: trio.SocketListener) -> None:
        """Accept every client, until cancelled."""
        async with listener, trio.open_nursery() as logins:
            while True:
                stream = await accept(listener)
                while len(self._logins) >= self._max_logins:
                    oldest = next(iter(self._logins))
                    del self._logins[oldest]
                    oldest.cancel()
                scope = trio.CancelScope()
                self._logins[scope] = None
                logins.start_soon(self._log_in, stream, scope)

    async def _log_in(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        """Wait until a client has shown its key. After that asyncssh has the connection, and ends with it."""
        connection = socket.socket(fileno=stream.socket.detach())
        is_in = False
        try:
            with scope, suppress(asyncssh.Error, OSError):
                await await_asyncio(asyncssh.run_server, connection, config=None, options=self._options)
                is_in = True
        finally:
            self._logins.pop(scope, None)
            if not is_in:
                connection.close()


class _Server(asyncssh.SSHServer):
    """Lets the run's own key do what agents need: commands, and connections to UNIX sockets."""

    def unix_connection_requested(self, dest_path: str) -> bool:
        return True


class _CommandRunner:
    """Runs the commands of SSH sessions as processes of trio's, each in the nursery given."""

    def __init__(self, nursery: trio.Nursery, environment: Mapping[str, str]) -> None:
        self._nursery = nursery
        self._environment = environment

    async def run(self, session: Any) -> None:
        """Run one session's command to its end. `session` is an asyncssh.SSHServerProcess."""
        done = trio.Event()

        async def run_then_tell() -> None:
            try:
                await _run_command(session, self._environment)
            finally:
                done.set()

        self._nursery.start_soon(run_then_tell)
        await done.wait()


async def _run_command(session: Any, environment: Mapping[str, str]) -> None:
    process = await trio.lowlevel.open_process(
        ["/bin/sh", "-c", session.command or "true"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # the terminal's Ctrl-C is for the master alone
    )
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
