"""The store in which ranks meet. Rank 0 serves it, and the others connect once it does.

Torch's own client (2.13) rests for 0.3 to 0.75 s after a connection that is refused, which is more than all else of a
restart takes.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

_CONNECTS_WITHIN_S = 1.0
_WAITS_S = 10.0
"""Then torch goes on as it does by itself: a rank that connects all the time would not be seen to hang."""
_PAUSE_S = 0.005
_PAUSE_OF_EACH_S = 1e-4
"""So that rank 0's machine has to refuse at most ten thousand connections a second, however many ranks there are."""


def connect_once_served(is_over: Callable[[], bool] = lambda: False) -> None:
    """Have this process's ranks other than 0 wait for their store until it is served, or `is_over`.

    Torch's own function is wrapped, if it is imported by now.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        plain = c10d.rendezvous
        c10d.rendezvous = _Rendezvous(plain.plain if isinstance(plain, _Rendezvous) else plain, is_over)


class _Rendezvous:
    def __init__(self, plain: Callable[..., Any], is_over: Callable[[], bool]) -> None:
        self.plain = plain
        self._is_over = is_over

    def __call__(self, url: Any, rank: int = -1, world_size: int = -1, **options: Any) -> Any:
        own, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        number = rank if rank >= 0 else int(own) if own.isdecimal() else 0
        # Whatever is missing or wrong, torch names it.
        if str(url).startswith("env:") and number and host and port.isdecimal():
            num_ranks = world_size if world_size > 0 else int(world) if world.isdecimal() else 1
            await_served((host, int(port)), num_ranks, self._is_over)
        return self.plain(url, rank, world_size, **options)


def await_served(address: tuple[str, int], num_ranks: int, is_over: Callable[[], bool]) -> None:
    """Return once a connection to an address is not refused. Raises ConnectionAbortedError if it is over before."""
    pause_s, until_s = max(_PAUSE_S, num_ranks * _PAUSE_OF_EACH_S), time.monotonic() + _WAITS_S
    while not is_over():
        try:
            socket.create_connection(address, _CONNECTS_WITHIN_S).close()
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                return
            time.sleep(pause_s)
        except OSError:
            return  # torch knows how long to go on
        else:
            return
    raise ConnectionAbortedError(f"the attempt is over, and its rank 0 has not served its store at {address}")
