"""Who may log in next: callers at a port of ours, and our own logins at the ports of others.

Anyone who can reach a port can connect to it. A silent caller costs only a descriptor, and a limited number of those. A
caller that begins SSH waits for a turn to show its key. Addresses take turns, so many callers from one address keep no
other address out.
"""

from __future__ import annotations

import math
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Final

import asyncssh
import trio

from oobleck.runtime.listening import accept

LOGIN_TIMEOUT_S = 10.0
"""How long the other side may take to show its key; asyncssh's default is two minutes."""
_HELLO: Final = b"SSH-"
_POLL_S: Final = 0.05  # how often to look at a caller that has sent only a part of that


class _Caller:
    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.scope = trio.CancelScope()
        self.turn = trio.Event()
        self.address = ""
        with suppress(OSError):  # the caller has gone
            self.address = str(stream.socket.getpeername()[0])


@dataclass(eq=False)
class LoginGate:
    """Accepts connections, and limits how many may be silent, waiting or logging in."""

    let_in: Callable[[socket.socket], Awaitable[object]]
    """Takes over a caller's socket, returns once the caller is known, and may raise asyncssh's errors and OSError."""
    _: KW_ONLY
    max_logins: int
    max_waiting: int | None = None
    """How many may be silent, and how many may wait for their turn; the default is `max_logins`."""
    least_s: float = 0.0
    """How long a login may take at first while others wait."""
    login_timeout_s: float = LOGIN_TIMEOUT_S
    """How long a caller may take to begin, and a login otherwise."""

    def __post_init__(self) -> None:
        self._max_waiting = self.max_logins if self.max_waiting is None else self.max_waiting
        self._silent: dict[_Caller, None] = {}
        self._queue: dict[_Caller, None] = {}
        self._logins: dict[_Caller, float] = {}  # in their order, with their start
        self._changed = trio.Event()

    async def serve(self, listener: trio.SocketListener) -> None:
        async with listener, trio.open_nursery() as callers:
            callers.start_soon(self._give_turns)
            while True:
                # A caller's time begins once it is accepted, so of thousands at once some always log in in time.
                while len(self._queue) >= self._max_waiting:
                    await self._changed.wait()
                caller = _Caller(await accept(listener))
                if len(self._silent) >= self._max_waiting:
                    self._turn_away(self._silent)
                self._silent[caller] = None
                callers.start_soon(self._receive, caller)

    async def _receive(self, caller: _Caller) -> None:
        try:
            caller.scope.deadline = trio.current_time() + self.login_timeout_s
            with caller.scope, suppress(asyncssh.Error, OSError):
                if not await _begins_ssh(caller.stream) or caller not in self._silent:  # else it was turned away
                    return
                del self._silent[caller]
                self._queue[caller] = None
                self._note_change()
                # The wait for a turn is not the caller's fault, so it counts against no limit.
                caller.scope.deadline = math.inf
                await caller.turn.wait()
                await self.let_in(socket.socket(fileno=caller.stream.socket.detach()))
        finally:
            caller.stream.socket.close()
            self._forget(caller)

    async def _give_turns(self) -> None:
        """Start the oldest waiting login of the address with the fewest logins in progress, again and again."""
        while True:
            if not self._queue:
                await self._changed.wait()
            elif len(self._logins) >= self.max_logins:
                await self._make_room()
            else:
                in_progress = Counter(each.address for each in self._logins)
                caller = min(self._queue, key=lambda each: in_progress[each.address])
                del self._queue[caller]
                now_s = self._logins[caller] = trio.current_time()
                caller.scope.deadline = now_s + self.login_timeout_s
                caller.turn.set()
                self._note_change()

    async def _make_room(self) -> None:
        first = _oldest_of_most(self._logins)
        with trio.move_on_at(self._logins[first] + self.least_s):
            await self._changed.wait()
            return
        self._turn_away(self._logins)
        # On a slow machine that caller was nearly in, and it calls again: each next one has twice as long.
        self.least_s = min(2 * self.least_s, self.login_timeout_s)

    def _turn_away(self, callers: Iterable[_Caller]) -> None:
        caller = _oldest_of_most(callers)
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


def _oldest_of_most(callers: Iterable[_Caller]) -> _Caller:
    """Return the oldest caller from the address that has the most; O(callers)."""
    each = tuple(callers)
    counts = Counter(caller.address for caller in each)
    # The oldest has had the most time, and `max` returns the first of equals. By the most of an address, many callers
    # from one place keep out no other.
    return max(each, key=lambda caller: counts[caller.address])


async def _begins_ssh(stream: trio.SocketStream) -> bool:
    """Wait for SSH's first bytes, which stay unread; False if the caller sends anything else."""
    while (data := await stream.socket.recv(len(_HELLO), socket.MSG_PEEK)) != _HELLO:
        if not data or not _HELLO.startswith(data):
            return False
        # The socket stays readable through the bytes that were only peeked at, so nothing can wait for more of them.
        await trio.sleep(_POLL_S)
    return True


# OpenSSH turns callers away once ten have not authenticated (MaxStartups in sshd_config(5)), and a machine with many
# nodes, or a jump host in front of them, gets all their logins at once. This leaves two to other people.
_AT_ONCE: Final = 8
# This process does all handshakes one after the other, each in about 12 ms of CPU time, and must finish those that it
# begins before the first times out, after 10 s.
_AT_ONCE_IN_ALL: Final = 128


class Logins:
    """Limits our own logins at each server and in all; a server that does not answer delays none at another."""

    def __init__(self) -> None:
        self._all = trio.Semaphore(_AT_ONCE_IN_ALL, max_value=_AT_ONCE_IN_ALL)
        self._turns = defaultdict[str, trio.Semaphore](partial(trio.Semaphore, _AT_ONCE, max_value=_AT_ONCE))

    @asynccontextmanager
    async def turn(self, server: str) -> AsyncIterator[None]:
        """Wait for a turn at a server, and keep it until the context ends."""
        # A login that waits for its server must not hold a place of the total, so the server's turn comes first.
        async with self._turns[server], self._all:
            yield
