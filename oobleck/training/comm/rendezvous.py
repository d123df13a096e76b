"""Rendezvous over the control channel: a `torch.distributed.Store` that opens no port.

Every key is written once, by one rank, and read by ranks that can be named beforehand. So there is no server:
a put is pushed to the nodes that will read it, and each worker reads from its own board. A key is named
`generation/group/...`: it is forgotten once its group is formed, or a plan of a newer generation is in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta

from torch._C._distributed_c10d import Store

__all__ = ["RendezvousStore", "RendezvousTable"]

Publish = Callable[[str, bytes, tuple[str, ...]], None]


class RendezvousTable:
    """All rendezvous keys that this worker received, and its own."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._oldest = 0
        """Keys of older generations are of no use to anybody."""
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """Note a key that was received. Called by the control thread."""
        self.put_all([(key, value)])

    def put_all(self, keys: Iterable[tuple[str, bytes]]) -> None:
        """Note keys that were received together."""
        with self._changed:
            self._values.update((key, value) for key, value in keys if self._is_wanted(key))
            self._changed.notify_all()

    def publish(self, key: str, value: bytes, nodes: tuple[str, ...]) -> None:
        """Note a key of our own and push it to `nodes`."""
        self.put(key, value)
        self._publish(key, value, nodes)

    def wait(self, keys: list[str], timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Block until all keys are there. Raises TimeoutError naming those that are not, also once `is_over`."""
        with self._changed:
            self._changed.wait_for(lambda: is_over() or all(key in self._values for key in keys), timeout_s)
            if missing := [key for key in keys if key not in self._values]:
                end = "before it was given up" if is_over() else f"within {timeout_s} s"
                raise TimeoutError(f"no rendezvous key {', '.join(missing)} {end}")

    def wake(self) -> None:
        """Have those who wait see that it is over."""
        with self._changed:
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there. Raises KeyError."""
        with self._changed:
            return self._values[key]

    def has(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        with self._changed:
            return all(key in self._values for key in keys)

    def forget(self, groups: Collection[str]) -> None:
        """Drop the keys of groups that are formed."""
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if _group_of(key) not in groups}

    def forget_before(self, generation: int) -> None:
        """Drop the keys of older generations, and those that still come."""
        with self._changed:
            self._oldest = generation
            self._values = {key: value for key, value in self._values.items() if self._is_wanted(key)}

    def _is_wanted(self, key: str) -> bool:
        generation, _, _ = key.partition("/")
        return not generation.isdecimal() or int(generation) >= self._oldest


def _group_of(key: str) -> str:
    return "/".join(key.split("/", 3)[:3])


class RendezvousStore(Store):
    """What a process group of `nodes` sees of the board: the store's interface, as far as Gloo uses it."""

    def __init__(
        self,
        board: RendezvousTable,
        nodes: tuple[str, ...],
        timeout_s: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits end once `is_over`, when the board is woken."""
        super().__init__()
        self._board = board
        self._nodes = nodes
        self._timeout_s = timeout_s
        self._is_over = is_over

    def set(self, key: str, value: str | bytes) -> None:
        self._board.publish(key, value.encode() if isinstance(value, str) else bytes(value), self._nodes)

    def get(self, key: str) -> bytes:
        self._board.wait([key], self._timeout_s, self._is_over)
        return self._board.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._board.wait(keys, timeout_s, self._is_over)

    def check(self, keys: list[str]) -> bool:
        return self._board.has(keys)
