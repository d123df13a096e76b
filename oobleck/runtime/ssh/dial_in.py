"""SSH the other way round: a node connects to the master and is the SSH server on that connection.

Both sides show a key that was made for this run: the node a host key, the master a client key. Neither can impersonate
the other, and a signature belongs to one connection (RFC 4252, section 7), so a recorded one cannot be replayed.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import asyncssh
import trio

from oobleck.errors import NodeUnreachable
from oobleck.job import NodeSpec

from .asyncssh_adapter import run_on
from .client import SSHConnection, SSHOptions
from .node_server import CommandProcesses, node_server_options

_USER = "oobleck"
_KEEPALIVE_S = 5.0
_LOGIN_TIMEOUT_S = 30.0  # a node may wait this long for its turn when thousands call at once


@dataclass(frozen=True, slots=True, kw_only=True)
class DialInKeys:
    """The master's private key, and the public key of its nodes."""

    own_key: str
    node_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePass:
    """The private key that all nodes of a run share, and the public key of its master."""

    master: str
    """HOST:PORT where the newest master listens."""
    own_key: str
    master_key: str


class Farewell(IntEnum):
    """Why a master ends a node's connection for good, as SSH's codes for private use (RFC 4250, section 4.2.2)."""

    RELEASED = 0xFE00_0001
    REPLACED = 0xFE00_0002
    """Another process has dialled in under the same name."""
    REFUSED = 0xFE00_0003
    """The node's introduction cannot be used; the reason says why."""


def make_keys(*, master: str) -> tuple[DialInKeys, NodePass]:
    ours, theirs = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    our_private, their_private = (key.export_private_key().decode() for key in (ours, theirs))
    our_public, their_public = (key.export_public_key().decode().strip() for key in (ours, theirs))
    keys = DialInKeys(own_key=our_private, node_key=their_public)
    return keys, NodePass(master=master, own_key=their_private, master_key=our_public)


class RefusedCaller(Exception):
    """A caller does not have the run's key, or does not accept ours."""


async def call_back(caller: socket.socket, keys: DialInKeys) -> SSHConnection:
    """Log in to a node that has dialled in, and take over its socket.

    Raises RefusedCaller, or asyncssh.Error or OSError if the connection breaks.
    """
    options = SSHOptions(
        client_keys=(asyncssh.import_private_key(keys.own_key),),
        host_keys=(asyncssh.import_public_key(keys.node_key),),
        use_defaults=False,
    )
    try:
        host = str(caller.getpeername()[0])
    except OSError:
        caller.close()
        raise
    arguments = options.for_node(NodeSpec(name=host, host=host, user=_USER))
    try:
        connection = await run_on(asyncssh.run_client, caller, **arguments)
    except asyncssh.HostKeyNotVerifiable as error:
        raise RefusedCaller(f"a node at {host} has dialled in with another key than this run's") from error
    except asyncssh.PermissionDenied as error:
        raise RefusedCaller(f"a node at {host} has dialled in that expects another run's master") from error
    return SSHConnection(host, host, connection, options=options, takes_calls=False)


async def dial_in(
    host: str,
    port: int,
    known: NodePass,
    *,
    environment: Mapping[str, str],
    nursery: trio.Nursery,
    processes: CommandProcesses | None = None,
    login_timeout_s: float = _LOGIN_TIMEOUT_S,
    keepalive_s: float = _KEEPALIVE_S,
) -> Callable[[], Awaitable[tuple[Farewell, str] | None]]:
    """Connect to the master and serve it once it has shown its key.

    Returns a function that waits for the connection's end and returns the master's farewell, if there was one.
    `node_server_options` explains the arguments. Raises NodeUnreachable, or ValueError for a pass without keys.
    """
    ended, errors = trio.Event(), list[Exception | None]()

    def on_end(error: Exception | None) -> None:
        errors.append(error)
        ended.set()

    async def wait_for_end() -> tuple[Farewell, str] | None:
        await ended.wait()
        error = errors[0]
        if isinstance(error, asyncssh.DisconnectError) and error.code in {*Farewell}:
            # asyncssh adds the code to the reason if it does not know it.
            return Farewell(error.code), error.reason.removesuffix(f" (error {error.code})")
        return None

    options = await node_server_options(
        host_key=asyncssh.import_private_key(known.own_key),
        client_key=asyncssh.import_public_key(known.master_key),
        environment=environment,
        nursery=nursery,
        on_end=on_end,
        processes=processes,
        keepalive_s=keepalive_s,
        login_timeout_s=login_timeout_s,
    )
    place = f"{host}:{port}"
    try:
        stream = await trio.open_tcp_stream(host, port)
    except OSError as error:
        raise NodeUnreachable(place, f"nothing listens there ({error.strerror or error})") from error
    # Only asyncssh may close the descriptor from here on, so it leaves trio's socket.
    connection = socket.socket(fileno=stream.socket.detach())
    try:
        await run_on(asyncssh.run_server, connection, config=None, options=options)
    except asyncssh.HostKeyNotVerifiable as error:
        raise NodeUnreachable(place, "the master there knows another key; is it of another run?") from error
    except (asyncssh.Error, OSError) as error:
        raise NodeUnreachable(place, f"no master of this run answers there ({error})") from error
    return wait_for_end
