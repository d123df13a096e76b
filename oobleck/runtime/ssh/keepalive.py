"""Whether the other side of a connection is there: it is asked while it says nothing, and only then.

asyncssh sets a timer for its next question again with each packet that comes, and each of these timers wakes the
process once more when its time has come, although it is cancelled. With agents that send heartbeats this costs as much
as a fifth of the master's time. So asyncssh asks nothing while an agent is heard, and one look in each interval sees
whether it still is.
"""

from __future__ import annotations

import asyncssh

from .asyncssh_adapter import call_later

_RESTING_S = 60.0


class Keepalive:
    """Has asyncssh ask, or not. Who falls silent is given up within one interval of when it would be without this."""

    def __init__(self, connection: asyncssh.SSHClientConnection, *, interval_s: float, count_max: int) -> None:
        """asyncssh asks already: every `interval_s`, and `count_max` times in vain before the connection is lost."""
        self._connection = connection
        self._interval_s = interval_s
        self._count_max = count_max
        self._is_asking = True
        self._is_resting = False
        self._is_heard = False

    def hear(self) -> None:
        """Something has come. Called by asyncssh."""
        self._is_heard = True
        if self._is_asking and not self._is_resting and self._interval_s:
            self._is_asking = False
            self._connection.set_keepalive(interval=0)
            call_later(self._interval_s, self._look)

    def rest(self, is_resting: bool) -> None:
        """Ask seldom, while the other side is heard by another way: often enough for a firewall."""
        self._is_resting = is_resting
        self._ask(_RESTING_S if is_resting else self._interval_s, self._count_max)

    def _look(self) -> None:
        if self._is_asking or self._connection.is_closed():
            return
        if self._is_heard:
            self._is_heard = False
            call_later(self._interval_s, self._look)
        else:
            self._ask(self._interval_s, self._count_max - 1)  # one interval has passed already

    def _ask(self, interval_s: float, count_max: int) -> None:
        self._is_asking = True
        self._connection.set_keepalive(interval=interval_s, count_max=count_max)
