"""Rendezvous over the control channel: a `torch.distributed.Store` that opens no port.

Every key is written once, by one rank, and read by ranks that can be named beforehand. So there is no server:
a put is pushed to the nodes that will read it, and each worker reads from its own board.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta

from torch._C._distributed_c10d import Store

__all__ = ["Board", "BoardStore"]

Publish = Callable[[str, bytes, tuple[str, ...]], None]


class Board:
    """All rendezvous keys that this worker was told, and its own."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """Note a key that was received. Called by the control thread."""
        self.put_all([(key, value)])

    def put_all(self, keys: Iterable[tuple[str, bytes]]) -> None:
        """Note keys that were received together."""
        with self._changed:
            self._values.update(keys)
            self._changed.notify_all()

    def publish(self, key: str, value: bytes, nodes: tuple[str, ...]) -> None:
        """Note a key of our own and push it to `nodes`."""
        self.put(key, value)
        self._publish(key, value, nodes)

    def wait(self, keys: list[str], timeout_s: float) -> None:
        """Block until all keys are there. Raises TimeoutError naming those that are not."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s):
                missing = [key for key in keys if key not in self._values]
                raise TimeoutError(f"no rendezvous key {', '.join(missing)} within {timeout_s} s")

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there. Raises KeyError."""
        with self._changed:
            return self._values[key]

    def has(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""
        with self._changed:
            return all(key in self._values for key in keys)

    def forget(self, prefix: str) -> None:
        """Drop the keys of an old generation."""
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]


class BoardStore(Store):
    """What a process group of `nodes` sees of the board: the store's interface, as far as Gloo uses it."""

    def __init__(self, board: Board, nodes: tuple[str, ...], timeout_s: float) -> None:
        super().__init__()
        self._board = board
        self._nodes = nodes
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self._board.publish(key, value.encode() if isinstance(value, str) else bytes(value), self._nodes)

    def get(self, key: str) -> bytes:
        self._board.wait([key], self._timeout_s)
        return self._board.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._board.wait(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self._board.has(keys)
