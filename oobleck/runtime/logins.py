"""How many connections are set up at one time through one SSH server.

OpenSSH turns some away as soon as ten have not yet proved who they are (MaxStartups in sshd_config(5)), and a machine
of many nodes, or a jump host in front of them, is asked by all of them at once.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final

import trio

__all__ = ["Logins"]

_AT_ONCE: Final = 8
"""Of OpenSSH's ten, two are left to other people."""


class Logins:
    """Whose turn it is to connect, at each server apart: one that does not answer delays nobody at another."""

    def __init__(self) -> None:
        self._turns = defaultdict[str, trio.Semaphore](partial(trio.Semaphore, _AT_ONCE, max_value=_AT_ONCE))

    def turn(self, server: str) -> AbstractAsyncContextManager[None]:
        """Wait for a turn at a server, and keep it until the context ends."""
        return self._turns[server]
