"""Nodes that dial in: where SSH logins are not allowed, `oobleck node` runs on each node and connects to the master.

This is the only case in which Oobleck listens on a port for control. A caller must show the run's key first
(`runtime/ssh/dial_in.py`).
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import asyncssh
import trio

from oobleck.errors import ConfigError, NodeUnreachable, PeerError, UsageError
from oobleck.host.writing import write_whole
from oobleck.job import NodeSpec
from oobleck.runtime import ssh
from oobleck.runtime.descriptors import raise_descriptor_limit
from oobleck.runtime.files import private_directory
from oobleck.wire import decode_json, encode_json

from .launcher import Arrived, Leaving, NodeChange, OutOfMemory, Reported
from .listed import Parser

T = TypeVar("T")

INTRODUCTION = "OOBLECK_NODE"
"""The variable that holds a node's `Introduction` in its commands' environment."""

_MASTER, _NODE = "master.json", "node.json"
_INTRODUCE = f'printf %s "${INTRODUCTION}"'
_LOGIN_S = 10.0
_CALLS_AGAIN_S = 0.1  # a node calls again at once, which takes a third of this
_LOGINS = 32
_WAITING = 512
_LEAST_LOGIN_S = 5.0  # 32 logins at a time take 0.4 s of one core, and no more than this on a busy one
_MOST_CHANGES = 100_000
_MOST_REFUSALS = 100  # callers without the key that are reported, one per address
_MOST_ORIGIN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """How a node introduces itself to the master."""

    process: str
    """Tells this `oobleck node` from an earlier one with the same name."""
    line: str
    origin: str = ""
    """Names, for people, what allocated the node."""
    grant: str = ""
    """The id of the job or pod that the node belongs to; empty if unknown."""

    @classmethod
    def parse(cls, text: bytes) -> Introduction:
        """Raises PeerError."""
        introduction = decode_json(cls, text)
        origin = introduction.origin
        if len(origin) > _MOST_ORIGIN_CHARS or not origin.isprintable():
            raise PeerError(f"its origin is {origin[:_MOST_ORIGIN_CHARS]!r}; it must be one short line")
        return introduction

    def __str__(self) -> str:
        return encode_json(self).decode().strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Caller:
    introduction: Introduction
    spec: NodeSpec
    connection: ssh.SSHConnection


@dataclass(eq=False, kw_only=True)
class DialedInNodes:
    """Launcher: a run begins once `num_first` nodes have dialled in; others may join later."""

    are_virtual = False
    python = "python3"  # `oobleck node` puts its own interpreter first

    num_first: int
    parse: Parser
    patience_s: float
    """How long `connect` waits for a node."""
    begins_after_s: float = math.inf
    """When a run begins with fewer nodes, if there are any."""
    login_timeout_s: float = _LOGIN_S
    calls_again_s: float = _CALLS_AGAIN_S
    """If one node alone loses its connection and does not call again within this time, it has ended."""

    def __post_init__(self) -> None:
        self._callers: dict[str, _Caller] = {}
        self._called = trio.Event()
        self._has_begun = False
        self._begins_s = math.inf
        self._report, self._changes = trio.open_memory_channel[NodeChange](_MOST_CHANGES)
        self._refused: set[str] = set()
        self._grants: dict[str, str] = {}
        self.released: dict[str, str] = {}
        """Nodes that were given back, with the grants that they had."""

    async def serve(self, listeners: Sequence[trio.SocketListener], keys: ssh.DialInKeys) -> None:
        gate = ssh.LoginGate(
            partial(self._let_in, keys),
            max_logins=_LOGINS,
            max_waiting=min(_WAITING, raise_descriptor_limit() // 8),
            least_s=_LEAST_LOGIN_S,
            login_timeout_s=self.login_timeout_s,
        )
        try:
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(gate.serve, listener)
        finally:
            for caller in self._callers.values():
                # This code is no farewell, so nodes look for the next master.
                caller.connection.disconnect(asyncssh.DISC_BY_APPLICATION, "the master leaves")

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        return tuple(caller.spec for caller in self._callers.values() if not caller.connection.is_lost)

    async def begin(self, *, waits: bool = True) -> tuple[NodeSpec, ...]:
        """Wait for the first nodes, and return all that have dialled in by then."""
        if waits:
            await self._wait_until(self._are_enough)
            while not self.nodes:
                await self._called.wait()
        self._has_begun = True
        return self.nodes

    async def found_again(self, nodes: Sequence[NodeSpec], asked: Set[str]) -> Sequence[NodeSpec]:
        """Return those that have dialled in; wait for one until there are enough nodes to begin with."""

        def found() -> list[NodeSpec]:
            here = {spec.name: spec for spec in self.nodes}
            return [here[node.name] for node in nodes if node.name in here and node.name not in asked]

        if asked >= {node.name for node in nodes}:
            return ()
        await self._wait_until(lambda: bool(found()) or self._are_enough())
        return found()

    def _are_enough(self) -> bool:
        return len(self.nodes) >= self.num_first

    async def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Wait for calls until this holds, or until a run begins with fewer nodes."""
        self._begins_s = min(self._begins_s, trio.current_time() + self.begins_after_s)
        with trio.move_on_at(self._begins_s):
            while not is_reached():
                await self._called.wait()

    async def connect(self, node: NodeSpec) -> ssh.SSHConnection:
        """Return the connection that the node has made; wait if it must dial in again. Raises NodeUnreachable."""
        with trio.move_on_after(self.patience_s):
            while (caller := self._callers.get(node.name)) is None or caller.connection.is_lost:
                await self._called.wait()
            self.released.pop(node.name, None)
            return caller.connection
        # A node that stays away must not count as one of several that were lost together (`has_ended`).
        self._callers.pop(node.name, None)
        reason = f"it has not dialled in within {self.patience_s:g} s; is `oobleck node` running there?"
        raise NodeUnreachable(node.name, reason)

    async def has_ended(self, node: NodeSpec) -> bool:
        """Whether its `oobleck node` has ended: its connection was closed, and it does not call again."""
        caller = self._callers.get(node.name)
        if caller is None or caller.connection.is_ended_here or not caller.connection.is_lost:
            return False
        with trio.move_on_after(self.calls_again_s):
            while self._callers.get(node.name) is caller:
                await self._called.wait()
            return False
        # If several connections end together, or the only one, the network or this machine may be to blame.
        lost = [each for each in self._callers.values() if each.connection.is_lost]
        if lost != [caller] or len(self._callers) == 1:
            return False
        del self._callers[node.name]
        return True

    async def follow(self, changes: trio.MemorySendChannel[NodeChange]) -> None:
        """Report nodes that dial in; connections and leases reveal losses."""
        async for change in self._changes:
            await changes.send(change)

    async def release(self, node: NodeSpec) -> None:
        """End the node's `oobleck node`, which gives its resources back to the scheduler."""
        caller = self._callers.pop(node.name, None)
        self.released[node.name] = "" if caller is None else caller.introduction.grant
        if caller is not None and not caller.connection.is_lost:
            caller.connection.disconnect(ssh.Farewell.RELEASED, "the run no longer needs this node")

    def named(self, text: str) -> NodeSpec:
        """Return a node that has dialled in. Raises UsageError."""
        known = {spec.name: spec for spec in self.nodes}
        if text not in known:
            raise UsageError(f"no node {text!r} has dialled in; there are {', '.join(known)}")
        return known[text]

    async def _let_in(self, keys: ssh.DialInKeys, caller: socket.socket) -> None:
        try:
            connection = await ssh.call_back(caller, keys)
        except ssh.RefusedCaller as error:
            if len(self._refused) < _MOST_REFUSALS and str(error) not in self._refused:
                self._refused.add(str(error))
                self.report(f"{error}; it is turned away")
            return
        is_in = False
        try:
            self._take_in(await self._introduced(connection))
            is_in = True
        except (ConfigError, PeerError) as error:
            connection.disconnect(ssh.Farewell.REFUSED, str(error))
        except (trio.BrokenResourceError, trio.TooSlowError):
            pass  # the node has gone, and calls again by itself
        finally:
            if not is_in:
                connection.disconnect(asyncssh.DISC_BY_APPLICATION, "")

    async def _introduced(self, connection: ssh.SSHConnection) -> _Caller:
        """Raises ConfigError or PeerError for an unusable introduction, and what `run` raises."""
        introduction = Introduction.parse((await connection.run(_INTRODUCE, timeout_s=_LOGIN_S)).stdout)
        specs = self.parse(introduction.line, source="a node that dials in")
        if len(specs) != 1:
            raise PeerError(f"it is {introduction.line!r}, which must name one host")
        # Whatever the line says, the node is where its connection comes from.
        spec = replace(specs[0], host=connection.peer_address, user=None, port=None, origin=introduction.origin)
        return _Caller(introduction=introduction, spec=spec, connection=connection)

    def _take_in(self, caller: _Caller) -> None:
        name, grant = caller.spec.name, caller.introduction.grant
        before = self._callers.get(name)
        is_same = before is not None and before.introduction.process == caller.introduction.process
        if before is not None and not before.connection.is_lost:
            # The same process lost its connection without our noticing; another one was started to replace it.
            code = asyncssh.DISC_BY_APPLICATION if is_same else ssh.Farewell.REPLACED
            before.connection.disconnect(code, f"another `oobleck node` has dialled in as {name}")
        self._callers[name] = caller
        self._called.set()
        self._called = trio.Event()
        if self._has_begun and not is_same:
            if grant and self.released.get(name) == grant:  # its scheduler restarted it, although the run released it
                text = f"{name} has dialled in again after it was given back; `oobleck add {name}` takes it in"
                self.report(text, level="info")
            else:
                # Under another grant it belongs to a new job or pod, which was started on purpose.
                self._send(Arrived(node=caller.spec, by_itself=self._grants.get(name, grant) == grant))
        self._grants[name] = grant

    def leave(self, node: str) -> None:
        """Report that a node will be taken away, if it has dialled in."""
        if node in {spec.name for spec in self.nodes}:
            self._send(Leaving(node=node))

    def ran_out_of_memory(self, node: str) -> None:
        """Report that all processes of a node were killed for their memory."""
        self._send(OutOfMemory(node=node))

    def report(self, text: str, *, level: str = "warning") -> None:
        self._send(Reported(level=level, text=text))

    def _send(self, change: NodeChange) -> None:
        with suppress(trio.WouldBlock):  # no task follows the changes
            self._report.send_nowait(change)


async def listen(host: str | None, port: int) -> tuple[list[trio.SocketListener], str]:
    """Listen on all interfaces, or those of `host`; returns also the HOST:PORT for nodes. Raises UsageError."""
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise UsageError(f"--dial-in: {host or 'any address'}, port {port}: {error.strerror or error}") from error
    bound = listeners[0].socket.getsockname()[1]
    named = host or socket.gethostname()
    return list(listeners), f"[{named}]:{bound}" if ":" in named else f"{named}:{bound}"


def settle_keys(directory: Path, *, master: str, renew: bool) -> tuple[ssh.DialInKeys, Path]:
    """Return the keys of a run and the file for its nodes, which dial in at `master`. Raises ConfigError."""
    private_directory(directory)
    ours, theirs = directory / _MASTER, directory / _NODE
    keys, known = ssh.make_keys(master=master)
    # The nodes of an earlier master look for the next one with the keys that they have.
    if not renew and ours.exists():
        keys, known = _read(ours, ssh.DialInKeys), replace(read_pass(theirs), master=master)
    _write(ours, keys)
    _write(theirs, known)
    return keys, theirs


def make_key_files(directory: Path, *, master: str) -> Path:
    """Make keys for a master at `master`; return the file for nodes. Raises ConfigError, also if keys exist."""
    if (directory / _MASTER).exists():
        raise ConfigError(f"{directory / _MASTER} exists already; remove it if no run needs it any more")
    return settle_keys(directory, master=master, renew=True)[1]


def read_keys(directory: Path) -> tuple[ssh.DialInKeys, Path]:
    """Read keys that `make_key_files` made; returns them and the file for nodes. Raises ConfigError."""
    return _read(directory / _MASTER, ssh.DialInKeys), directory / _NODE


def read_pass(path: Path) -> ssh.NodePass:
    """Read a node's file. Raises ConfigError."""
    return _read(path, ssh.NodePass)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return decode_json(kind, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, PeerError) as error:
        raise ConfigError(f"{path}: not the keys of a run ({error})") from error


def _write(path: Path, keys: ssh.DialInKeys | ssh.NodePass) -> None:
    try:
        write_whole(path, encode_json(keys))
    except OSError as error:
        raise ConfigError(f"the keys of a run cannot be written: {path}: {error.strerror}") from error
