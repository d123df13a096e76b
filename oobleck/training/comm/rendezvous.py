"""How members of a group that is being formed find each other: a `torch.distributed.Store` that opens no port.

Every key is written once, by one rank, and read by ranks that can be named beforehand. So there is no server:
a value is pushed to those who will read it, and each worker reads from its own table. A key begins with the name of its
group: it is forgotten once the group is formed, or once a plan newer than the one that it was said under is in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import timedelta

from torch._C._distributed_c10d import Store


class RendezvousTable:
    """All values that this worker was told, and its own."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, bytes]] = {}
        """With the generation under which each was said."""
        self._oldest = 0
        """Values of older generations are of no use to anybody."""
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes, *, generation: int) -> None:
        """Note a value. Any thread may."""
        with self._changed:
            if generation >= self._oldest:
                self._values[key] = generation, value
                self._changed.notify_all()

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
        """Return a value that is there. Raises KeyError."""
        with self._changed:
            return self._values[key][1]

    def has(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        with self._changed:
            return all(key in self._values for key in keys)

    def forget(self, groups: Collection[str]) -> None:
        """Drop the keys of groups that are formed."""
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if _group_of(key) not in groups}

    def forget_before(self, generation: int) -> None:
        """Drop what was said under older generations, and what of it still comes."""
        with self._changed:
            self._oldest = generation
            self._values = {key: value for key, value in self._values.items() if value[0] >= generation}


def _group_of(key: str) -> str:
    return "/".join(key.split("/", 3)[:3])


class RendezvousStore(Store):
    """What a process group sees of the table: the store's interface, as far as Gloo uses it."""

    def __init__(
        self,
        table: RendezvousTable,
        tell: Callable[[str, bytes], None],
        timeout_s: float,
        *,
        generation: int = 0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`tell` has all readers of a key told its value. Waits end once `is_over`, when the table is woken."""
        super().__init__()
        self._table = table
        self._tell = tell
        self._timeout_s = timeout_s
        self._generation = generation
        self._is_over = is_over

    def set(self, key: str, value: str | bytes) -> None:
        told = value.encode() if isinstance(value, str) else bytes(value)
        self._table.put(key, told, generation=self._generation)
        self._tell(key, told)

    def get(self, key: str) -> bytes:
        self._table.wait([key], self._timeout_s, self._is_over)
        return self._table.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._table.wait(keys, timeout_s, self._is_over)

    def check(self, keys: list[str]) -> bool:
        return self._table.has(keys)
