"""SSH as a client: connect to a node, run commands there, and reach its UNIX sockets.

What ssh itself would check is checked: host keys against known_hosts, and `~/.ssh/config` is honoured. What goes
wrong becomes a NodeUnreachable that says what to change.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import asyncssh
import trio

from oobleck.errors import NodeUnreachable
from oobleck.job import NodeSpec

from .asyncssh_adapter import SSHStream, await_asyncio, open_ssh_loop

__all__ = ["CompletedCommand", "SSHConnection", "SSHOptions", "connect", "open_ssh_loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHOptions:
    """How nodes are reached. None leaves a choice to ssh's own files and defaults."""

    client_keys: tuple[asyncssh.SSHKey | Path, ...] | None = None
    host_keys: tuple[asyncssh.SSHKey, ...] | None = None
    """Pinned host keys, in place of a known_hosts file."""
    known_hosts: Path | None = None
    config: Path | None = None
    use_defaults: bool = True
    """Whether the user's own config, keys and agent are looked at where nothing is given."""
    connect_timeout_s: float = 10.0
    keepalive_interval_s: float = 5.0
    keepalive_count_max: int = 3

    def for_node(self, node: NodeSpec) -> dict[str, object]:
        """asyncssh's options for a connection to `node`; what is left out it takes from ssh's files."""
        options: dict[str, object] = {
            "keepalive_interval": self.keepalive_interval_s,
            "keepalive_count_max": self.keepalive_count_max,
        }
        if node.port is not None:
            options["port"] = node.port
        if node.user is not None:
            options["username"] = node.user
        if self.client_keys is not None:
            options["client_keys"] = list(self.client_keys)
        if self.host_keys is not None:
            options["known_hosts"] = (list(self.host_keys), [], [])
        elif self.known_hosts is not None:
            options["known_hosts"] = str(self.known_hosts)
        if self.config is not None:
            options["config"] = [str(self.config)]
        elif not self.use_defaults:
            options["config"] = None
        if not self.use_defaults:
            options["agent_path"] = None
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCommand:
    """A command that ended on a node; `exit_status` is -1 when a signal ended it."""

    exit_status: int
    stdout: bytes
    stderr: bytes


class SSHConnection:
    """An authenticated connection to one node."""

    def __init__(self, node: str, connection: asyncssh.SSHClientConnection) -> None:
        self._node = node
        self._connection = connection

    @property
    def peer_address(self) -> str:
        """The node's address, as this connection reached it."""
        return str(self._connection.get_extra_info("peername")[0])

    @property
    def is_lost(self) -> bool:
        return bool(self._connection.is_closed())

    async def run(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> CompletedCommand:
        """Run a shell command. Raises trio.TooSlowError, or trio.BrokenResourceError when the connection is lost."""
        try:
            with trio.fail_after(timeout_s):
                result = await await_asyncio(self._connection.run, command, input=stdin, encoding=None)
        except (asyncssh.Error, OSError) as error:
            raise trio.BrokenResourceError(f"{self._node}: {error}") from error
        status = result.exit_status
        return CompletedCommand(
            exit_status=-1 if status is None else status, stdout=_bytes(result.stdout), stderr=_bytes(result.stderr)
        )

    async def open_unix(self, path: str) -> trio.abc.HalfCloseableStream:
        """Connect to a UNIX socket on the node. Raises trio.BrokenResourceError."""
        try:
            _, stream = await await_asyncio(self._connection.create_unix_connection, SSHStream, path)
        except (asyncssh.Error, OSError) as error:
            raise trio.BrokenResourceError(f"{self._node}: socket {path}: {error}") from error
        assert isinstance(stream, SSHStream)
        return stream

    async def wait_lost(self) -> None:
        """Wait until the connection is closed, by whomever."""
        await await_asyncio(self._connection.wait_closed)

    async def aclose(self) -> None:
        """Close the connection, and what runs through it."""
        self._connection.close()
        await await_asyncio(self._connection.wait_closed)


def _bytes(output: str | bytes | None) -> bytes:
    return output if isinstance(output, bytes) else b""


async def connect(node: NodeSpec, options: SSHOptions) -> SSHConnection:
    """Connect and authenticate. Raises NodeUnreachable, in words that say what to change."""
    target = f"{node.host}:{node.port}" if node.port is not None else node.host
    try:
        with trio.fail_after(options.connect_timeout_s):
            connection = await await_asyncio(asyncssh.connect, node.host, **options.for_node(node))
    except trio.TooSlowError as error:
        reason = f"{target} did not answer SSH within {options.connect_timeout_s:g} s; check host, port and firewall"
        raise NodeUnreachable(node.name, reason) from error
    except (asyncssh.Error, OSError) as error:
        raise NodeUnreachable(node.name, _explain(node, target, error, options)) from error
    return SSHConnection(node.name, connection)


def _explain(node: NodeSpec, target: str, error: Exception, options: SSHOptions) -> str:
    match error:
        case asyncssh.HostKeyNotVerifiable():
            file = options.known_hosts or Path("~/.ssh/known_hosts")
            port = f"-p {node.port} " if node.port is not None else ""
            return (
                f"the host key of {target} is not the one in {file}, or is not there ({error}); connect once by "
                f"`ssh {port}{node.host}`, compare its fingerprint, and let ssh add it"
            )
        case asyncssh.PermissionDenied():
            user = f"user {node.user}" if node.user else "your user"
            return f"{target} lets {user} in with none of the keys tried; add a public key to authorized_keys there"
        case asyncssh.KeyImportError() | asyncssh.ConfigParseError():
            return f"ssh's own files cannot be used: {error}"
        case ConnectionRefusedError():
            return f"{target} refused the connection; is sshd running there, and is the port right?"
        case socket.gaierror():
            return f"the host name {node.host!r} cannot be resolved ({error.strerror}); check the hostfile"
        case OSError():
            return f"{target} cannot be reached: {error.strerror or error}"
        case _:
            return f"SSH to {target} failed: {error}"
