"""An SSH server for virtual nodes on this machine, in place of sshd.

Everything else is as with real hosts: the same connections, agents and sockets. Its keys are made for one run, are
kept in memory, and die with it. It listens on loopback only, one port for each virtual node.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncssh
import trio

from oobleck.job import NodeSpec

from .asyncssh_adapter import await_asyncio, awaitable_by_asyncio
from .ssh import SSHOptions

__all__ = ["serve_local_nodes"]

_HOST = "127.0.0.1"
_READ_BYTES = 1 << 16


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
        servers = [
            await await_asyncio(
                asyncssh.listen,
                _HOST,
                0,
                server_factory=_Server,
                server_host_keys=[host_key],
                authorized_client_keys=authorized,
                process_factory=awaitable_by_asyncio(runner.run),
                encoding=None,
                config=None,
            )
            for _ in range(count)
        ]
        nodes = tuple(
            NodeSpec(name=f"node{index}", host=_HOST, port=server.sockets[0].getsockname()[1], user="oobleck")
            for index, server in enumerate(servers)
        )
        options = SSHOptions(client_keys=(client_key,), host_keys=(host_key.convert_to_public(),), use_defaults=False)
        try:
            yield nodes, options
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(2):
                for server in servers:
                    server.close()
                for server in servers:
                    await await_asyncio(server.wait_closed)
            commands.cancel_scope.cancel()


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
    """Copy output; drained before the exit is told, or asyncssh would lose it."""
    with suppress(asyncssh.Error, ConnectionError):
        while data := await source.receive_some(_READ_BYTES):
            target.write(data)
            await await_asyncio(target.drain)
