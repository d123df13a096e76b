"""SSH as a client: connect to a node, run commands there, and reach its UNIX sockets.

Like ssh, it checks host keys against known_hosts and honours `~/.ssh/config`. Failures become NodeUnreachable, which
says what to change.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import asyncssh
import trio

from oobleck.errors import NodeUnreachable
from oobleck.job import NodeSpec

from .asyncssh_adapter import Keepalive, Preamble, SSHCommandStream, SSHStream, await_asyncio, marked
from .host_config import Jump, ProxyCommand, configured_algorithms, jumps_of, key_arguments, read_config
from .known_hosts import HostKeyFiles, KnownHosts, find_known_hosts, new_host
from .login_gate import Logins

T = TypeVar("T")

# A run has this many commands in progress on one connection; OpenSSH allows ten by default.
_SESSIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHOptions:
    """How to reach nodes. None leaves a choice to ssh's own files and defaults."""

    client_keys: tuple[asyncssh.SSHKey | Path, ...] | None = None
    host_keys: tuple[asyncssh.SSHKey, ...] | None = None
    """Pinned host keys, which replace known_hosts."""
    config: Path | None = None
    """Replaces the user's own config, like `ssh -F`."""
    use_defaults: bool = True
    """Whether to use the user's own config, keys and agent where an option is None."""
    connect_timeout_s: float = 10.0
    keepalive_interval_s: float = 5.0
    keepalive_count_max: int = 3
    logins: Logins = field(default_factory=Logins, repr=False, compare=False)
    host_key_files: HostKeyFiles = field(default_factory=HostKeyFiles, repr=False, compare=False)

    def for_node(self, node: NodeSpec) -> dict[str, object]:
        """Return asyncssh's arguments for a connection to `node`; for the rest it reads ssh's files."""
        arguments: dict[str, object] = {
            "keepalive_interval": self.keepalive_interval_s,
            "keepalive_count_max": self.keepalive_count_max,
            "port": node.port,
            "username": node.user,
            "client_keys": None if self.client_keys is None else list(self.client_keys),
            "known_hosts": None if self.host_keys is None else (list(self.host_keys), [], []),
            "config": None if self.config is None else [str(self.config)],
        }
        arguments = {name: value for name, value in arguments.items() if value is not None}
        if not self.use_defaults:
            # To asyncssh, None means none at all, and a missing argument the user's own.
            arguments["agent_path"] = None
            arguments.setdefault("config", None)
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCommand:
    """A command that ended on a node; `exit_status` is -1 if a signal ended the shell."""

    exit_status: int
    stdout: bytes
    stderr: bytes
    cause: str = ""
    """The end of an error message: what the login shell printed before the command, if anything."""


class SSHConnection:
    def __init__(
        self,
        node: str,
        host: str,
        connection: asyncssh.SSHClientConnection,
        *,
        options: SSHOptions,
        takes_calls: bool,
        proxy: ProxyCommand | None = None,
    ) -> None:
        """`host` is the name or address that the connection leads to in the end, through `proxy` if there is one.

        `takes_calls` says that we connected to the node itself: through no other machine and no command, and not by
        its own call.
        """
        self._node = node
        self._connection = connection
        peer = connection.get_extra_info("peername")  # None through a command, empty through a jump host
        self.peer_address = str(peer[0]) if peer and peer[0] else host
        """The node's address as this connection reached it, or its name where another host reached it for us."""
        self.keepalive = Keepalive(
            connection, interval_s=options.keepalive_interval_s, count_max=options.keepalive_count_max
        )
        self._proxy = proxy
        self.takes_calls = takes_calls
        self.is_ended_here = False
        """Whether this side ended the connection, which then says nothing about the node."""

    @property
    def is_lost(self) -> bool:
        # What is ended here counts at once: who needs the node meanwhile must not get what is being closed.
        return self.is_ended_here or bool(self._connection.is_closed())

    async def run(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> CompletedCommand:
        """Run a shell command; `stdout` excludes what the login shell prints before it.

        Raises trio.TooSlowError, or trio.BrokenResourceError if the connection is lost or the login shell runs no
        command. A cancelled or late command gets SIGTERM; before it has begun, the connection is closed instead.
        """
        try:
            with trio.fail_after(timeout_s):
                process = await self._open(
                    self._connection.create_process, marked(command), input=stdin, encoding=None, request_pty=False
                )
                try:
                    result = await await_asyncio(process.wait)
                finally:
                    # asyncssh would leave the command running, and its channel open. OpenSSH forwards the signal for
                    # every user but root.
                    if process.exit_status is None:
                        with suppress(OSError):  # the connection is lost, so no signal reaches the command
                            process.terminate()
                    process.close()
        except (asyncssh.Error, OSError) as error:
            raise self._broken(error) from error
        if result.exit_status is None:
            raise trio.BrokenResourceError(f"{self._node}: the connection was lost before the command ended")
        preamble = Preamble()
        stdout = preamble.strip(_bytes(result.stdout))
        if not preamble.has_ended:
            raise trio.BrokenResourceError(
                f"{self._node}: its login shell runs no command (exit status {result.exit_status}){preamble.as_cause()}"
            )
        return CompletedCommand(
            exit_status=result.exit_status, stdout=stdout, stderr=_bytes(result.stderr), cause=preamble.as_cause()
        )

    async def open_unix(self, path: str) -> trio.abc.HalfCloseableStream:
        """Connect to a UNIX socket on the node. Raises trio.BrokenResourceError."""
        try:
            session = partial(SSHStream, self.keepalive.note_traffic)
            _, stream = await self._open(self._connection.create_unix_connection, session, path)
        except asyncssh.ChannelOpenError as error:
            raise trio.BrokenResourceError(
                f"{self._node}: its SSH server does not forward to {path} ({error}); the socket must exist there, and "
                "AllowStreamLocalForwarding and AllowTcpForwarding must be yes or local in its sshd_config, and "
                "neither DisableForwarding nor PermitOpen may forbid it"
            ) from error
        except (asyncssh.Error, OSError) as error:
            raise trio.BrokenResourceError(f"{self._node}: socket {path}: {error}") from error
        assert isinstance(stream, SSHStream)
        return stream

    async def open_command(self, command: str) -> SSHCommandStream:
        """Start a shell command and return its input and output. Raises trio.BrokenResourceError."""
        create = self._connection.create_session
        try:
            _, stream = await self._open(create, SSHCommandStream, marked(command), encoding=None, request_pty=False)
        except (asyncssh.Error, OSError) as error:
            raise self._broken(error) from error
        return cast("SSHCommandStream", stream)

    def _broken(self, error: Exception) -> trio.BrokenResourceError:
        if isinstance(error, asyncssh.ChannelOpenError):
            return trio.BrokenResourceError(
                f"{self._node}: its SSH server opens no more sessions on a connection ({error}); MaxSessions must be "
                f"at least {_SESSIONS} in its sshd_config"
            )
        return trio.BrokenResourceError(f"{self._node}: {error}")

    async def _open(self, function: Callable[..., Awaitable[T]], *arguments: object, **options: object) -> T:
        try:
            return await await_asyncio(function, *arguments, **options)
        except trio.Cancelled:
            # asyncssh would leave the channel half-open, so the whole connection goes.
            self.is_ended_here = True
            self._connection.abort()
            raise

    def disconnect(self, code: int, reason: str) -> None:
        """Close the connection at once and send the reason, with one of SSH's codes (RFC 4253, section 11.1)."""
        self.is_ended_here = True
        self._connection.disconnect(code, reason)

    async def aclose(self) -> None:
        self.is_ended_here = True
        try:
            self._connection.close()
            await await_asyncio(self._connection.wait_closed)
        finally:
            if self._proxy is not None:
                self._proxy.end()


def _bytes(output: str | bytes | None) -> bytes:
    return output if isinstance(output, bytes) else b""


class _Attempt:
    """The server that is being connected to, a node or a jump host: what an error message needs."""

    def __init__(self, spec: NodeSpec, *, is_jump_host: bool = False) -> None:
        self.spec = spec
        self.is_jump_host = is_jump_host
        self.target = f"{'jump host ' * is_jump_host}{_target(spec)}"
        self.known_hosts: KnownHosts | None = None
        self.algorithms: tuple[str, ...] = ()
        self.proxy_command: Sequence[str] = ()

    async def prepare(self, arguments: dict[str, object], options: SSHOptions) -> asyncssh.SSHClientConnectionOptions:
        """Add to asyncssh's arguments what ssh's config says about the server; returns the resolved options."""
        resolved = await read_config(self.spec.host, arguments)
        self.algorithms = configured_algorithms(resolved)
        arguments |= key_arguments(resolved, arguments)
        if "known_hosts" not in arguments:
            self.known_hosts = find_known_hosts(resolved)
            arguments["known_hosts"] = self.known_hosts.as_option(options.host_key_files)
            newcomer = await new_host(self.known_hosts, options.host_key_files, _by_hand(self.spec, options))
            if newcomer is not None:
                arguments["client_factory"] = lambda: newcomer
        return resolved


async def connect(node: NodeSpec, options: SSHOptions) -> SSHConnection:
    """Connect and authenticate; many calls may run at once. Raises NodeUnreachable, which says what to change."""
    arguments = options.for_node(node)
    attempts = [_Attempt(node)]  # the last is the one that fails
    proxy: ProxyCommand | None = None
    connection: asyncssh.SSHClientConnection | None = None
    hops: list[asyncssh.SSHClientConnection] = []
    host, server = node.host, _target(node)
    try:
        with trio.fail_after(options.connect_timeout_s):
            resolved = await attempts[0].prepare(arguments, options)
            jumps = jumps_of(resolved)
        if attempts[0].known_hosts is not None:
            host, server = str(resolved.host), _first_server(resolved)
        # Logins to the same server wait for each other, and no timeout counts that wait.
        async with options.logins.turn(server):
            with trio.fail_after(options.connect_timeout_s):
                if resolved.proxy_command:
                    attempts[0].proxy_command = resolved.proxy_command
                    proxy = ProxyCommand(resolved.proxy_command)
                    arguments["sock"] = proxy.socket
                elif jumps:
                    await _open_hops(attempts, jumps, options, arguments.get("config", ()), hops)
                    arguments["tunnel"] = hops[-1]
                connection = await await_asyncio(asyncssh.connect, node.host, **arguments)
                if hops:
                    connection.set_tunnel(hops[-1])  # it closes with the connection
    except trio.TooSlowError as error:
        silence = f"{attempts[-1].target} did not answer SSH within {options.connect_timeout_s:g} s"
        raise NodeUnreachable(node.name, f"{silence}; check host, port and firewall") from error
    except asyncssh.HostKeyNotVerifiable as error:
        raise NodeUnreachable(node.name, _explain_host_key(attempts[-1], error, options)) from error
    except (asyncssh.Error, OSError, ValueError) as error:  # asyncssh raises ValueError for bad files
        raise NodeUnreachable(node.name, _explain(attempts[-1], error)) from error
    finally:
        if proxy is not None and connection is None:
            proxy.socket.close()
            proxy.end()
        if hops and connection is None:
            # The other hops close with the last one, whose tunnels they are.
            hops[-1].close()
    return SSHConnection(
        node.name, host, connection, options=options, takes_calls=proxy is None and not hops, proxy=proxy
    )


async def _open_hops(
    attempts: list[_Attempt],
    jumps: Sequence[Jump],
    options: SSHOptions,
    config: object,
    hops: list[asyncssh.SSHClientConnection],
) -> None:
    """Connect to the hosts of a ProxyJump, each through the one before, and add them to `hops`."""
    # asyncssh could do so by itself, but it would parse all of known_hosts for each node behind them.
    for jump in jumps:
        arguments: dict[str, object] = {"config": config, "tunnel": hops[-1] if hops else ()}
        arguments |= {"username": jump.user} if jump.user else {}
        arguments |= {"port": jump.port} if jump.port else {}
        spec = NodeSpec(name=jump.host, host=jump.host, port=jump.port, user=jump.user)
        attempts.append(_Attempt(spec, is_jump_host=True))
        await attempts[-1].prepare(arguments, options)
        hop = await await_asyncio(asyncssh.connect, jump.host, **arguments)
        hop.set_tunnel(hops[-1] if hops else None)
        hops.append(hop)
        attempts.pop()


def _target(node: NodeSpec) -> str:
    return f"{node.host}:{node.port}" if node.port is not None else node.host


def _first_server(resolved: asyncssh.SSHClientConnectionOptions) -> str:
    """Return the server to log in to first: a jump host if there is one."""
    if resolved.tunnel:
        return str(resolved.tunnel).split(",")[0]
    # Which server a command connects to is unknown: it may be the same for all.
    return "a proxy command" if resolved.proxy_command else f"{resolved.host}:{resolved.port}"


def _explain_host_key(attempt: _Attempt, error: asyncssh.HostKeyNotVerifiable, options: SSHOptions) -> str:
    known_hosts, spec, target = attempt.known_hosts, attempt.spec, attempt.target
    if known_hosts is None:
        return f"the host key of {target} is not the pinned one ({error})"
    files = " and ".join(str(path) for path in known_hosts.readable or known_hosts.files[:1])
    if not files:
        return f"no host key of {target} is known: ssh's config names no known_hosts file; name one for it there"
    if known_hosts.knows_host(options.host_key_files):
        return (
            f"{target} shows another host key than {files} has for {known_hosts.names[0]}: it was reinstalled, or "
            "another machine answers in its place; if you know that it is the right one, `ssh-keygen -R` removes the "
            "old key"
        )
    return (
        f"the host key of {target} is not in {files}, where it has the name {known_hosts.names[0]}; connect once by "
        f"`{' '.join(_by_hand(spec, options))}`, compare its fingerprint, and let ssh add it, or set "
        "`StrictHostKeyChecking accept-new` for it in ssh's config"
    )


def _by_hand(spec: NodeSpec, options: SSHOptions) -> list[str]:
    """Return the command that connects to a host without us."""
    words = ["ssh"]
    if options.config is not None:
        words += ["-F", str(options.config)]
    if spec.port is not None:
        words += ["-p", str(spec.port)]
    return [*words, f"{spec.user}@{spec.host}" if spec.user is not None else spec.host]


def _explain(attempt: _Attempt, error: Exception) -> str:
    spec, target = attempt.spec, attempt.target
    where = "ProxyJump in ssh's config" if attempt.is_jump_host else "the hostfile"
    command = shlex.join(attempt.proxy_command)
    through = f"ProxyCommand `{command}` of ssh's config" if command else ""
    match error:
        case asyncssh.PermissionDenied():
            user = f"user {spec.user}" if spec.user else "your user"
            return f"{target} lets {user} in with none of the keys tried; add a public key to authorized_keys there"
        case asyncssh.ConnectionLost() | ConnectionResetError():
            if attempt.algorithms:
                names = ", ".join(attempt.algorithms)
                why = f"it may support none of the algorithms that ssh's config asks for ({names})"
            else:
                why = "too many logins may be in progress there (MaxStartups in its sshd_config)"
            why += ", or it turns this address away: its log says which"
            failure = f" or {through} fails" if through else ""
            return f"{target} closed the connection before any login{failure}; {why}"
        case ValueError():
            return f"ssh's own files cannot be used: {error}"
        case ConnectionRefusedError():
            return f"{target} refused the connection; is sshd running there, and is the port right?"
        case socket.gaierror():
            return f"the host name {spec.host!r} cannot be resolved ({error.strerror}); check {where}"
        # The cases above are more particular errors of the system.
        case OSError():
            file = f" ({error.filename})" if error.filename else ""
            how = f" through {through}" if through else ""
            return f"{target} cannot be reached{how}: {error.strerror or error}{file}"
        case _:
            return f"SSH to {target} failed: {error}"
