"""Takes in who connects to a port, before it is known who it is.

Anybody who reaches a port can connect to it. Who does so without the key holds a descriptor, so that few may, and not
for long.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import asyncssh
import trio

from oobleck.runtime.listening import accept

from .node_server import LOGIN_TIMEOUT_S

__all__ = ["Doorkeeper"]


class Doorkeeper:
    """Takes connections in. Of too many that have not yet shown the key, the oldest goes: it had the most time.

    Those beyond are not accepted before: thousands that come at once are let in one after the other, and not all so
    slowly that none is in time.
    """

    def __init__(
        self,
        let_in: Callable[[socket.socket], Awaitable[object]],
        *,
        max_logins: int,
        least_s: float = 0.0,
        login_timeout_s: float = LOGIN_TIMEOUT_S,
    ) -> None:
        """`let_in` takes a caller's socket over, and returns once it is known who it is.

        It has `login_timeout_s` for that, and at first `least_s` where others wait. It may raise asyncssh's errors and
        OSError.
        """
        self._let_in = let_in
        self._max_logins = max_logins
        self._least_s = least_s
        self._login_timeout_s = login_timeout_s
        self._logins: dict[trio.CancelScope, float] = {}
        """Those that are under way, in their order, and since when."""
        self._is_done = trio.Event()

    async def serve(self, listener: trio.SocketListener) -> None:
        """Accept every caller, until cancelled."""
        async with listener, trio.open_nursery() as logins:
            while True:
                stream = await accept(listener)
                try:
                    while len(self._logins) >= self._max_logins:
                        await self._make_room()
                except trio.Cancelled:
                    stream.socket.close()
                    raise
                now_s = trio.current_time()
                scope = trio.CancelScope(deadline=now_s + self._login_timeout_s)
                self._logins[scope] = now_s
                logins.start_soon(self._log_in, stream, scope)

    async def _make_room(self) -> None:
        """Wait until somebody is in, or the oldest has had its time.

        Where the machine is slow that one was nearly in, and calls again: each next has twice as long.
        """
        oldest, began_s = next(iter(self._logins.items()))
        with trio.move_on_at(began_s + self._least_s):
            await self._is_done.wait()
            return
        oldest.cancel()
        self._forget(oldest)
        self._least_s = min(2 * self._least_s, self._login_timeout_s)

    def _forget(self, scope: trio.CancelScope) -> None:
        self._logins.pop(scope, None)
        self._is_done.set()
        self._is_done = trio.Event()

    async def _log_in(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            with scope, suppress(asyncssh.Error, OSError):
                await self._let_in(socket.socket(fileno=stream.socket.detach()))
        finally:
            self._forget(scope)
