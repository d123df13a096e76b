"""How many connections are set up at one time through one SSH server.

OpenSSH turns some away as soon as ten have not yet proved who they are (MaxStartups in sshd_config(5)), and a machine
of many nodes, or a jump host in front of them, is asked by all of them at once.

Of thousands of nodes, each behind a server of its own, this process does the handshakes one after the other all the
same: it begins only as many at one time as it can end before the first of them is given up for late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

_AT_ONCE: Final = 8
"""Of OpenSSH's ten, two are left to other people."""
_AT_ONCE_IN_ALL: Final = 128
"""A handshake takes about 12 ms of processor time here, and may take 10 s."""


class Logins:
    """Whose turn it is to connect, at each server apart: one that does not answer delays none at another.

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
