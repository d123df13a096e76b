"""Nodes that dial in: where nobody may log in, `oobleck node` runs on each and connects to the master.

The port that it connects to is the only one that Oobleck ever listens on for control, and only here. Who calls has
to show the run's key before anything else is done (`runtime/ssh/dial_in.py`).
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
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

from .launcher import Arrived, Leaving, NodeChange, Reported
from .listed import Parser

T = TypeVar("T")

INTRODUCTION = "OOBLECK_NODE"
"""A variable in which a node has what it says of itself: an `Introduction`."""

_MASTER, _NODE = "master.json", "node.json"
_INTRODUCE = f'printf %s "${INTRODUCTION}"'
_LOGIN_S = 10.0
_CALLS_AGAIN_S = 0.1  # a node calls again at once, which takes a third of this
_LOGINS = 32
_WAITING = 512
_LEAST_LOGIN_S = 5.0  # so many logins at one time take 0.4 s of one core, and no more than this where it is busy
_MOST_CHANGES = 100_000
_MOST_REFUSALS = 100  # so many addresses of callers without the key are named; then no more
_MOST_ORIGIN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a node says of itself."""

    process: str
    """Distinguishes it from an `oobleck node` that had its name before."""
    line: str
    """As in a hostfile."""
    origin: str = ""
    """What has given the node, for people."""
    grant: str = ""
    """Under which that has given it this time: the id of a job or a pod. Empty where nobody knows."""

    @classmethod
    def parse(cls, text: bytes) -> Introduction:
        """Read one. Raises PeerError."""
        said = decode_json(cls, text)
        if len(said.origin) > _MOST_ORIGIN_CHARS or not said.origin.isprintable():
            raise PeerError(f"its origin is {said.origin[:_MOST_ORIGIN_CHARS]!r}; it must be one short line")
        return said

    def __str__(self) -> str:
        return encode_json(self).decode().strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Caller:
    """A node that has dialled in."""

    said: Introduction
    spec: NodeSpec
    connection: ssh.SSHConnection


class DialedInNodes:
    """Launcher: a run begins once so many nodes have dialled in; others may join later."""

    are_virtual = False
    python = "python3"
    """`oobleck node` puts its own interpreter first."""

    def __init__(
        self,
        *,
        num_first: int,
        parse: Parser,
        patience_s: float,
        begins_after_s: float = math.inf,
        login_timeout_s: float = _LOGIN_S,
        calls_again_s: float = _CALLS_AGAIN_S,
    ) -> None:
        """A node that is asked for has `patience_s` to dial in again; a caller has `login_timeout_s` to get in.

        One that lives and alone has lost its connection calls again within `calls_again_s`, or is held to have ended.
        After `begins_after_s` a run begins with the nodes that are there, if there are any.
        """
        self._num_first = num_first
        self._begins_after_s = begins_after_s
        self._parse = parse
        self._patience_s = patience_s
        self._login_timeout_s = login_timeout_s
        self._calls_again_s = calls_again_s
        self._callers: dict[str, _Caller] = {}
        self._called = trio.Event()
        self._has_begun = False
        self._report, self._changes = trio.open_memory_channel[NodeChange](_MOST_CHANGES)
        self._refused: set[str] = set()
        self._grants: dict[str, str] = {}  # under which each node was here last
        self.released: dict[str, str] = {}
        """Nodes that were given back, and under which grant they were here."""

    async def serve(self, listeners: Sequence[trio.SocketListener], keys: ssh.DialInKeys) -> None:
        """Take callers in, until cancelled."""
        let_in, timeout_s = partial(self._let_in, keys), self._login_timeout_s
        doorkeeper = ssh.Doorkeeper(
            let_in,
            max_logins=_LOGINS,
            max_waiting=min(_WAITING, raise_descriptor_limit() // 8),
            least_s=_LEAST_LOGIN_S,
            login_timeout_s=timeout_s,
        )
        try:
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(doorkeeper.serve, listener)
        finally:
            for caller in self._callers.values():
                caller.connection.disconnect(asyncssh.DISC_BY_APPLICATION, "the master leaves")

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        return tuple(caller.spec for caller in self._callers.values() if not caller.connection.is_lost)

    async def begin(self, *, waits: bool = True) -> tuple[NodeSpec, ...]:
        """Wait for the first nodes, as many as there have to be; all that are there by then begin."""
        least = self._num_first if waits else 0
        with trio.move_on_after(self._begins_after_s):
            while len(self.nodes) < least:
                await self._called.wait()
            least = 0
        while len(self.nodes) < min(least, 1):
            await self._called.wait()
        self._has_begun = True
        return self.nodes

    async def connect(self, node: NodeSpec) -> ssh.SSHConnection:
        """The connection that the node has made; waits for one that dials in again. Raises NodeUnreachable."""
        with trio.move_on_after(self._patience_s):
            while (caller := self._callers.get(node.name)) is None or caller.connection.is_lost:
                await self._called.wait()
            self.released.pop(node.name, None)
            return caller.connection
        self._callers.pop(node.name, None)
        reason = f"it has not dialled in within {self._patience_s:g} s; is `oobleck node` running there?"
        raise NodeUnreachable(node.name, reason)

    async def has_ended(self, node: NodeSpec) -> bool:
        """Whether its `oobleck node` has ended: the kernel closes what a process has, and one that lives calls again.

        Where several connections end together, or the only one, it may be a network's doing, or our own.
        """
        caller = self._callers.get(node.name)
        if caller is None or caller.connection.is_ended_here or not caller.connection.is_lost:
            return False
        with trio.move_on_after(self._calls_again_s):
            while self._callers.get(node.name) is caller:
                await self._called.wait()
            return False
        gone = [each for each in self._callers.values() if each.connection.is_lost]
        if gone != [caller] or len(self._callers) == 1:
            return False
        del self._callers[node.name]
        return True

    async def follow(self, changes: trio.MemorySendChannel[NodeChange]) -> None:
        """Report who dials in. Connections and leases say who is lost."""
        async for change in self._changes:
            await changes.send(change)

    async def release(self, node: NodeSpec) -> None:
        """End the node's `oobleck node`: what it holds goes back to the scheduler that gave it."""
        caller = self._callers.pop(node.name, None)
        self.released[node.name] = "" if caller is None else caller.said.grant
        if caller is not None and not caller.connection.is_lost:
            caller.connection.disconnect(ssh.Farewell.RELEASED, "the run needs this node no more")

    def named(self, text: str) -> NodeSpec:
        """One that has dialled in. Raises UsageError."""
        known = {spec.name: spec for spec in self.nodes}
        if text not in known:
            raise UsageError(f"no node {text!r} has dialled in; there are {', '.join(known)}")
        return known[text]

    async def _let_in(self, keys: ssh.DialInKeys, caller: socket.socket) -> None:
        try:
            connection = await ssh.call_back(caller, keys)
        except ssh.RefusedCaller as error:
            self._note_refused(str(error))
            return
        is_in = False
        try:
            self._take_in(await self._introduced(connection))
            is_in = True
        except (ConfigError, PeerError) as error:
            connection.disconnect(ssh.Farewell.REFUSED, str(error))
        except (trio.BrokenResourceError, trio.TooSlowError):
            pass  # it has gone, and comes back by itself
        finally:
            if not is_in:
                connection.disconnect(asyncssh.DISC_BY_APPLICATION, "")

    async def _introduced(self, connection: ssh.SSHConnection) -> _Caller:
        """Ask a node who it is. Raises ConfigError or PeerError for what cannot be used, and what `run` raises."""
        said = Introduction.parse((await connection.run(_INTRODUCE, timeout_s=_LOGIN_S)).stdout)
        specs = self._parse(said.line, source="a node that dials in")
        if len(specs) != 1:
            raise PeerError(f"it is {said.line!r}, which must name one host")
        spec = replace(specs[0], host=connection.peer_address, user=None, port=None, origin=said.origin)
        return _Caller(said=said, spec=spec, connection=connection)

    def _take_in(self, caller: _Caller) -> None:
        name = caller.spec.name
        before = self._callers.get(name)
        if before is not None and not before.connection.is_lost:
            # The same process has lost sight of its connection. Another one was started for it, by who knows better.
            is_same = before.said.process == caller.said.process
            code = asyncssh.DISC_BY_APPLICATION if is_same else ssh.Farewell.REPLACED
            before.connection.disconnect(code, f"another `oobleck node` has dialled in as {name}")
        self._callers[name] = caller
        self._called.set()
        self._called = trio.Event()
        if self._has_begun and (before is None or before.said.process != caller.said.process):
            self._tell_arrival(caller)
        self._grants[name] = caller.said.grant

    def _tell_arrival(self, caller: _Caller) -> None:
        """One that was given back, and that is started again in its place, was not asked for."""
        name, grant = caller.spec.name, caller.said.grant
        if grant and self.released.get(name) == grant:
            text = f"{name} has dialled in again after it was given back; `oobleck add {name}` takes it in"
            self._tell(Reported(level="info", text=text))
        else:
            self._tell(Arrived(node=caller.spec, by_itself=self._grants.get(name, grant) == grant))

    def leave(self, node: str) -> None:
        """Have a node leave that will be taken away; nothing where it is not here."""
        if node in {spec.name for spec in self.nodes}:
            self._tell(Leaving(node=node))

    def report(self, text: str, *, level: str = "warning") -> None:
        """Have people read something."""
        self._tell(Reported(level=level, text=text))

    def _note_refused(self, text: str) -> None:
        if len(self._refused) < _MOST_REFUSALS and text not in self._refused:
            self._refused.add(text)
            self.report(f"{text}; it is turned away")

    def _tell(self, change: NodeChange) -> None:
        with suppress(trio.WouldBlock):  # nobody follows
            self._report.send_nowait(change)


async def listen(host: str | None, port: int) -> tuple[list[trio.SocketListener], str]:
    """Listen for nodes, on all interfaces if no host is named; returns the place to name to them. Raises UsageError."""
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise UsageError(f"--dial-in: {host or 'any address'}, port {port}: {error.strerror or error}") from error
    bound = listeners[0].socket.getsockname()[1]
    named = host or socket.gethostname()
    return list(listeners), f"[{named}]:{bound}" if ":" in named else f"{named}:{bound}"


def settle_keys(directory: Path, *, master: str, renew: bool) -> tuple[ssh.DialInKeys, Path]:
    """The keys of a run, and the file that its nodes need: those of the master before, unless they are to be renewed.

    `master` is where to dial in to. Raises ConfigError.
    """
    private_directory(directory)
    ours, theirs = directory / _MASTER, directory / _NODE
    keys, known = ssh.make_keys(master=master)
    if not renew and ours.exists():
        keys, known = _read(ours, ssh.DialInKeys), replace(read_pass(theirs), master=master)
    _write(ours, keys)
    _write(theirs, known)
    return keys, theirs


def make_key_files(directory: Path, *, master: str) -> Path:
    """Make keys beforehand, for a master that is to listen at `master`; returns the file that nodes need.

    Raises ConfigError, also where keys are there already.
    """
    if (directory / _MASTER).exists():
        raise ConfigError(f"{directory / _MASTER} is there already; remove it if no run needs it any more")
    return settle_keys(directory, master=master, renew=True)[1]


def read_keys(directory: Path) -> tuple[ssh.DialInKeys, Path]:
    """Read keys that were made beforehand; returns them, and the file that nodes need. Raises ConfigError."""
    return _read(directory / _MASTER, ssh.DialInKeys), directory / _NODE


def read_pass(path: Path) -> ssh.NodePass:
    """Read the file of a node. Raises ConfigError."""
    return _read(path, ssh.NodePass)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return decode_json(kind, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, PeerError) as error:
        raise ConfigError(f"{path}: not the keys of a run ({error})") from error


def _write(path: Path, keys: ssh.DialInKeys | ssh.NodePass) -> None:
    """Write a file for its user alone; readers see all of it or nothing. Raises ConfigError."""
    try:
        write_whole(path, encode_json(keys))
    except OSError as error:
        raise ConfigError(f"the keys of a run cannot be written: {path}: {error.strerror}") from error
