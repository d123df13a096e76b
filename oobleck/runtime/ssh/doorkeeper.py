"""Whose turn it is to log in: of those who connect to a port of ours, and of ours at the ports of others.

Anybody who reaches a port can connect to it. Who says nothing there costs a descriptor and no more, and may cost little
of those. Who speaks as SSH does waits for a turn to show the key, and addresses take turns: many callers of one address
keep nobody out who comes from another.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import asyncssh
import trio

from oobleck.runtime.listening import accept

from .node_server import LOGIN_TIMEOUT_S

_HELLO: Final = b"SSH-"
_LOOK_S: Final = 0.05  # how often a caller is looked at that has said a part of that


class _Caller:
    """Somebody at the door."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.address = _address_of(stream)
        self.scope = trio.CancelScope()
        self.turn = trio.Event()


class Doorkeeper:
    """Takes connections in. Of too many that have not yet shown the key, the oldest of an address goes that has the
    most: it had the most time.

    Where too many wait for their turn none is accepted any more: thousands that come at once are let in one after the
    other, and not all so slowly that none is in time.
    """

    def __init__(
        self,
        let_in: Callable[[socket.socket], Awaitable[object]],
        *,
        max_logins: int,
        max_waiting: int | None = None,
        least_s: float = 0.0,
        login_timeout_s: float = LOGIN_TIMEOUT_S,
    ) -> None:
        """`let_in` takes a caller's socket over, and returns once it is known who it is.

        It has `login_timeout_s` for that, and at first `least_s` where others wait; a caller has as long to begin. It
        may raise asyncssh's errors and OSError. `max_waiting` may be silent, and as many wait for their turn; as many
        as `max_logins` by default.
        """
        self._let_in = let_in
        self._max_logins = max_logins
        self._max_waiting = max_logins if max_waiting is None else max_waiting
        self._least_s = least_s
        self._login_timeout_s = login_timeout_s
        self._silent: dict[_Caller, float] = {}
        self._queue: dict[_Caller, None] = {}
        self._logins: dict[_Caller, float] = {}  # those that are under way, in their order, and since when
        self._changed = trio.Event()

    async def serve(self, listener: trio.SocketListener) -> None:
        """Accept every caller, until cancelled."""
        async with listener, trio.open_nursery() as callers:
            callers.start_soon(self._give_turns)
            while True:
                while len(self._queue) >= self._max_waiting:
                    await self._changed.wait()
                caller = _Caller(await accept(listener))
                if len(self._silent) >= self._max_waiting:
                    self._turn_away(self._silent)
                self._silent[caller] = trio.current_time()
                callers.start_soon(self._receive, caller)

    async def _receive(self, caller: _Caller) -> None:
        """See to a caller from its first word on."""
        try:
            caller.scope.deadline = trio.current_time() + self._login_timeout_s
            with caller.scope, suppress(asyncssh.Error, OSError):
                if not await _says_hello(caller.stream) or self._silent.pop(caller, None) is None:  # else turned away
                    return
                self._queue[caller] = None
                self._note_change()
                caller.scope.deadline = float("inf")
                await caller.turn.wait()
                await self._let_in(socket.socket(fileno=caller.stream.socket.detach()))
        finally:
            caller.stream.socket.close()
            self._forget(caller)

    async def _give_turns(self) -> None:
        """Have those log in that have said hello: one of the address that has the fewest, and there the oldest."""
        while True:
            if not self._queue:
                await self._changed.wait()
            elif len(self._logins) >= self._max_logins:
                await self._make_room()
            else:
                under_way = Counter(each.address for each in self._logins)
                caller = min(self._queue, key=lambda each: under_way[each.address])
                del self._queue[caller]
                now_s = self._logins[caller] = trio.current_time()
                caller.scope.deadline = now_s + self._login_timeout_s
                caller.turn.set()
                self._note_change()

    async def _make_room(self) -> None:
        """Wait until somebody is in, or one has had its time.

        Where the machine is slow that one was nearly in, and calls again: each next has twice as long.
        """
        first = _most_of(self._logins)
        with trio.move_on_at(self._logins[first] + self._least_s):
            await self._changed.wait()
            return
        self._turn_away(self._logins)
        self._least_s = min(2 * self._least_s, self._login_timeout_s)

    def _turn_away(self, callers: Iterable[_Caller]) -> None:
        caller = _most_of(callers)
        caller.scope.cancel()
        self._forget(caller)

    def _forget(self, caller: _Caller) -> None:
        self._silent.pop(caller, None)
        self._queue.pop(caller, None)
        self._logins.pop(caller, None)
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _most_of(callers: Iterable[_Caller]) -> _Caller:
    """The oldest of those from the address that has the most; O(callers)."""
    each = tuple(callers)
    counts = Counter(caller.address for caller in each)
    return max(each, key=lambda caller: counts[caller.address])


def _address_of(stream: trio.SocketStream) -> str:
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:  # it has gone
        return ""


async def _says_hello(stream: trio.SocketStream) -> bool:
    """Wait until a caller has said what SSH begins with, which stays to be read; False where it says something else."""
    while (said := await stream.socket.recv(len(_HELLO), socket.MSG_PEEK)) != _HELLO:
        if not said or not _HELLO.startswith(said):
            return False
        await trio.sleep(_LOOK_S)
    return True


_AT_ONCE: Final = 8  # of OpenSSH's ten, two are left to other people
_AT_ONCE_IN_ALL: Final = 128  # a handshake takes about 12 ms of processor time here, and may take 10 s


class Logins:
    """Whose turn it is to connect, at each server apart: one that does not answer delays none at another.

    OpenSSH turns some away as soon as ten have not yet proved who they are (MaxStartups in sshd_config(5)), and a
    machine of many nodes, or a jump host in front of them, is asked by all of them at once.

    Of thousands of nodes, each behind a server of its own, this process does the handshakes one after the other all the
    same: it begins only as many at one time as it can end before the first of them is given up for late.

    Only where more than a hundred servers do not answer, those that come after them wait for longer.
    """

    def __init__(self) -> None:
        self._all = trio.Semaphore(_AT_ONCE_IN_ALL, max_value=_AT_ONCE_IN_ALL)
        self._turns = defaultdict[str, trio.Semaphore](partial(trio.Semaphore, _AT_ONCE, max_value=_AT_ONCE))

    @asynccontextmanager
    async def turn(self, server: str) -> AsyncIterator[None]:
        """Wait for a turn at a server, and keep it until the context ends."""
        async with self._turns[server], self._all:
            yield
