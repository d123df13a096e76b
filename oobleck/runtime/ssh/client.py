"""SSH as a client: connect to a node, run commands there, and reach its UNIX sockets.

What ssh itself would check is checked: host keys against known_hosts, and `~/.ssh/config` is honoured. What goes
wrong becomes a NodeUnreachable that says what to change.
"""

from __future__ import annotations

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
from .doorkeeper import Logins
from .host_config import Jump, ProxyCommand, algorithms_asked_for, jumps_of, keys_asked_for, read_config
from .known_hosts import HostKeyFiles, KnownHosts, find_known_hosts

T = TypeVar("T")

_SESSIONS = 2
"""Commands that a run has under way on one connection: OpenSSH allows ten, unless its config says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHOptions:
    """How nodes are reached. None leaves a choice to ssh's own files and defaults."""

    client_keys: tuple[asyncssh.SSHKey | Path, ...] | None = None
    host_keys: tuple[asyncssh.SSHKey, ...] | None = None
    """Pinned host keys, in place of a known_hosts file."""
    config: Path | None = None
    """Read in place of the user's own config, as by `ssh -F`."""
    use_defaults: bool = True
    """Whether the user's own config, keys and agent are looked at where nothing is given."""
    connect_timeout_s: float = 10.0
    keepalive_interval_s: float = 5.0
    keepalive_count_max: int = 3
    logins: Logins = field(default_factory=Logins, repr=False, compare=False)
    """What all connections with these options share."""
    host_key_files: HostKeyFiles = field(default_factory=HostKeyFiles, repr=False, compare=False)

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
        if self.config is not None:
            options["config"] = [str(self.config)]
        elif not self.use_defaults:
            options["config"] = None
        if not self.use_defaults:
            options["agent_path"] = None
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCommand:
    """A command that ended on a node; `exit_status` is -1 when the shell was ended by a signal."""

    exit_status: int
    stdout: bytes
    stderr: bytes
    cause: str = ""
    """What the login shell printed before it, for the end of an error message; empty where it printed nothing."""


class SSHConnection:
    """An authenticated connection to one node."""

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
        """`host` is what was connected to in the end, by its name or address; `proxy` is what it is reached through.

        `takes_calls`: the node itself was connected to, by no other machine and no command, and did not call us.
        """
        self._node = node
        self._host = host
        self._connection = connection
        self._keepalive = Keepalive(
            connection, interval_s=options.keepalive_interval_s, count_max=options.keepalive_count_max
        )
        self._proxy = proxy
        self._is_ended_here = False
        self.takes_calls = takes_calls

    @property
    def peer_address(self) -> str:
        """The node's address, as this connection reached it; its name, where another host reached it for us."""
        peer = self._connection.get_extra_info("peername")  # none of a command, and an empty one of a jump host
        return str(peer[0]) if peer and peer[0] else self._host

    @property
    def is_lost(self) -> bool:
        return bool(self._connection.is_closed())

    @property
    def is_ended_here(self) -> bool:
        """Whether this side has ended it: that says nothing of the node."""
        return self._is_ended_here

    def rest(self, is_resting: bool) -> None:
        """Ask seldom whether the other side is there, while it is heard by another way: often enough for a firewall."""
        self._keepalive.rest(is_resting)

    async def run(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> CompletedCommand:
        """Run a shell command. Raises trio.TooSlowError, or trio.BrokenResourceError when the connection is lost.

        That is raised as well where the login shell runs no command. What it prints before is not part of `stdout`.

        A command that is cancelled, or runs out of time, is sent SIGTERM (which OpenSSH passes on to all users'
        commands but root's); cancelled before it has begun, it costs the connection.
        """
        try:
            with trio.fail_after(timeout_s):
                process = await self._open(
                    self._connection.create_process, marked(command), input=stdin, encoding=None, request_pty=False
                )
                try:
                    result = await await_asyncio(process.wait)
                finally:
                    _end(process)
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
            session = partial(SSHStream, self._keepalive.hear)
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
        """Start a shell command, and talk to it. Raises trio.BrokenResourceError."""
        create = self._connection.create_session
        try:
            _, stream = await self._open(create, SSHCommandStream, marked(command), encoding=None, request_pty=False)
        except (asyncssh.Error, OSError) as error:
            raise self._broken(error) from error
        return cast("SSHCommandStream", stream)

    def _broken(self, error: Exception) -> trio.BrokenResourceError:
        """What it means that a command could not be started, or went on without us."""
        if isinstance(error, asyncssh.ChannelOpenError):
            return trio.BrokenResourceError(
                f"{self._node}: its SSH server opens no more sessions on a connection ({error}); MaxSessions must be "
                f"at least {_SESSIONS} in its sshd_config"
            )
        return trio.BrokenResourceError(f"{self._node}: {error}")

    async def _open(self, function: Callable[..., Awaitable[T]], *arguments: object, **options: object) -> T:
        """Open a channel. A cancelled attempt costs the connection: asyncssh would leave the channel half-open."""
        try:
            return await await_asyncio(function, *arguments, **options)
        except trio.Cancelled:
            self._is_ended_here = True
            self._connection.abort()
            raise

    def disconnect(self, code: int, reason: str) -> None:
        """Close the connection at once, and tell the other side why by a code of SSH's (RFC 4253, section 11.1)."""
        self._is_ended_here = True
        self._connection.disconnect(code, reason)

    async def aclose(self) -> None:
        self._is_ended_here = True
        try:
            self._connection.close()
            await await_asyncio(self._connection.wait_closed)
        finally:
            if self._proxy is not None:
                self._proxy.end()


def _bytes(output: str | bytes | None) -> bytes:
    return output if isinstance(output, bytes) else b""


def _end(process: asyncssh.SSHClientProcess[bytes]) -> None:
    """End a command that nobody waits for any more; asyncssh would leave it to itself, and its channel open."""
    if process.exit_status is None:
        with suppress(OSError):  # the connection is gone, and no signal reaches the command
            process.terminate()
    process.close()


async def connect(node: NodeSpec, options: SSHOptions) -> SSHConnection:
    """Connect and authenticate. Raises NodeUnreachable, in words that say what to change.

    Many may connect at once; they wait for each other, beyond the timeout, where one server would turn some away.
    """
    asked = options.for_node(node)
    attempt = _Attempt(node)
    proxy: ProxyCommand | None = None
    connection: asyncssh.SSHClientConnection | None = None
    hops: list[asyncssh.SSHClientConnection] = []
    host, server = node.host, _target(node)
    try:
        with trio.fail_after(options.connect_timeout_s):
            found = await attempt.prepare(asked, options)
            jumps = jumps_of(found)
        if attempt.known_hosts is not None:
            host, server = str(found.host), _first_server(found)
        async with options.logins.turn(server):
            with trio.fail_after(options.connect_timeout_s):
                if found.proxy_command:
                    proxy = ProxyCommand(found.proxy_command)
                    asked["sock"] = proxy.socket
                elif jumps:
                    await _open_hops(attempt, jumps, options, asked.get("config", ()), hops)
                    asked["tunnel"] = hops[-1]
                connection = await await_asyncio(asyncssh.connect, node.host, **asked)
                if hops:
                    connection.set_tunnel(hops[-1])  # it closes with the connection
    except trio.TooSlowError as error:
        silence = f"{attempt.target} did not answer SSH within {options.connect_timeout_s:g} s"
        raise NodeUnreachable(node.name, f"{silence}; check host, port and firewall") from error
    except asyncssh.HostKeyNotVerifiable as error:
        raise NodeUnreachable(node.name, _explain_host_key(attempt, error, options)) from error
    except (asyncssh.Error, OSError, ValueError) as error:  # ValueError is what asyncssh finds wrong in files
        raise NodeUnreachable(node.name, _explain(attempt, error)) from error
    finally:
        if proxy is not None and connection is None:
            proxy.socket.close()
            proxy.end()
        if hops and connection is None:
            hops[-1].close()
    return SSHConnection(
        node.name, host, connection, options=options, takes_calls=proxy is None and not hops, proxy=proxy
    )


class _Attempt:
    """Which server is being connected to, for what people are told where that fails: a node, or a jump host."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.is_jump_host = False
        self.known_hosts: KnownHosts | None = None
        """None where its key is pinned."""
        self.algorithms: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return f"{'jump host ' * self.is_jump_host}{_target(self.spec)}"

    async def prepare(self, asked: dict[str, object], options: SSHOptions) -> asyncssh.SSHClientConnectionOptions:
        """Add to what is `asked` of asyncssh what ssh's config says of the server; returns all of that."""
        found = await read_config(self.spec.host, asked)
        self.algorithms = algorithms_asked_for(found)
        asked |= keys_asked_for(found, asked)
        if "known_hosts" not in asked:
            self.known_hosts = find_known_hosts(found)
            asked["known_hosts"] = self.known_hosts.as_option(options.host_key_files)
        return found


async def _open_hops(
    attempt: _Attempt,
    jumps: Sequence[Jump],
    options: SSHOptions,
    config: object,
    hops: list[asyncssh.SSHClientConnection],
) -> None:
    """Connect to the hosts of a ProxyJump, one through the other, and add them to `hops`.

    asyncssh would do so by itself, but parse all of known_hosts for each node that is behind them. `attempt` is about
    the host that fails, where one does, and about the node again at the end.
    """
    before = attempt.spec, attempt.known_hosts, attempt.algorithms
    attempt.is_jump_host = True
    for jump in jumps:
        asked: dict[str, object] = {"config": config, "tunnel": hops[-1] if hops else ()}
        asked |= {"username": jump.user} if jump.user else {}
        asked |= {"port": jump.port} if jump.port else {}
        attempt.spec = NodeSpec(name=jump.host, host=jump.host, port=jump.port, user=jump.user)
        await attempt.prepare(asked, options)
        hop = await await_asyncio(asyncssh.connect, jump.host, **asked)
        hop.set_tunnel(hops[-1] if hops else None)
        hops.append(hop)
    attempt.spec, attempt.known_hosts, attempt.algorithms = before
    attempt.is_jump_host = False


def _target(node: NodeSpec) -> str:
    return f"{node.host}:{node.port}" if node.port is not None else node.host


def _first_server(found: asyncssh.SSHClientConnectionOptions) -> str:
    """The server that is asked first: a jump host where there is one. One behind a command may be any."""
    if found.tunnel:
        return str(found.tunnel).split(",")[0]
    return "a proxy command" if found.proxy_command else f"{found.host}:{found.port}"


def _explain_host_key(attempt: _Attempt, error: asyncssh.HostKeyNotVerifiable, options: SSHOptions) -> str:
    """What to do about a host key; one that has changed may be somebody else's."""
    known_hosts, spec, target = attempt.known_hosts, attempt.spec, attempt.target
    if known_hosts is None:
        return f"the host key of {target} is not the pinned one ({error})"
    files = " and ".join(str(path) for path in known_hosts.readable or known_hosts.files[:1])
    if not files:
        return f"no host key is known of {target}: ssh's config names no known_hosts file; name one for it there"
    if known_hosts.knows_host(options.host_key_files):
        return (
            f"{target} shows another host key than {files} has for {known_hosts.names[0]}: it was reinstalled, or "
            "another machine answers in its place; if you know that it is the right one, `ssh-keygen -R` removes the "
            "old key"
        )
    words = [
        "ssh",
        *(["-F", str(options.config)] if options.config is not None else []),
        *(["-p", str(spec.port)] if spec.port is not None else []),
        f"{spec.user}@{spec.host}" if spec.user is not None else spec.host,
    ]
    return (
        f"the host key of {target} is not in {files}, where it has the name {known_hosts.names[0]}; connect once by "
        f"`{' '.join(words)}`, compare its fingerprint, and let ssh add it: Oobleck adds none, whatever "
        "StrictHostKeyChecking says"
    )


def _explain(attempt: _Attempt, error: Exception) -> str:
    spec, target = attempt.spec, attempt.target
    where = "ProxyJump in ssh's config" if attempt.is_jump_host else "the hostfile"
    match error:
        case asyncssh.PermissionDenied():
            user = f"user {spec.user}" if spec.user else "your user"
            return f"{target} lets {user} in with none of the keys tried; add a public key to authorized_keys there"
        case asyncssh.ConnectionLost() | ConnectionResetError() if attempt.algorithms:
            return (
                f"{target} closed the connection before anybody was let in; it may have none of the algorithms that "
                f"ssh's config asks for ({', '.join(attempt.algorithms)}), or turns this address away: its log says "
                "which"
            )
        case asyncssh.ConnectionLost() | ConnectionResetError():
            return (
                f"{target} closed the connection before anybody was let in; too many logins may be under way there "
                "(MaxStartups in its sshd_config), or it turns this address away: its log says which"
            )
        case ValueError():
            return f"ssh's own files cannot be used: {error}"
        case ConnectionRefusedError():
            return f"{target} refused the connection; is sshd running there, and is the port right?"
        case socket.gaierror():
            return f"the host name {spec.host!r} cannot be resolved ({error.strerror}); check {where}"
        case OSError():
            file = f" ({error.filename})" if error.filename else ""
            return f"{target} cannot be reached: {error.strerror or error}{file}"
        case _:
            return f"SSH to {target} failed: {error}"
