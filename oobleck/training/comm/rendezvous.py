"""How the members of a group find each other while it is formed: a `torch.distributed.Store` that opens no port.

One rank writes each key, once, and its readers are known beforehand. So there is no server: a value is pushed to its
readers, and each worker reads its own table. The table drops a key once its group is formed, or once a plan newer than
the key's is in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import timedelta

from torch._C._distributed_c10d import Store


class RendezvousTable:
    """The values of all members that this worker has received, and its own."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, bytes]] = {}  # with their generations
        self._oldest = 0  # the oldest generation whose values are kept
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes, *, generation: int) -> None:
        """Store a value. Any thread may call this."""
        with self._changed:
            # A value may arrive after a newer plan has taken effect, and would stay: its group is never formed.
            if generation >= self._oldest:
                self._values[key] = generation, value
                self._changed.notify_all()

    def wait(self, keys: list[str], timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> list[bytes]:
        """Block until all keys have values, and return these. Raises TimeoutError that names missing keys, also once
        `is_over`."""
        with self._changed:
            self._changed.wait_for(lambda: is_over() or all(key in self._values for key in keys), timeout_s)
            if missing := [key for key in keys if key not in self._values]:
                end = "before it was given up" if is_over() else f"within {timeout_s} s"
                raise TimeoutError(f"no rendezvous key {', '.join(missing)} {end}")
            return [self._values[key][1] for key in keys]

    def wake(self) -> None:
        """Have waiters check whether they are over."""
        with self._changed:
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._values)

    def has(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def forget(self, groups: Collection[str]) -> None:
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if _group_of(key) not in groups}

    def forget_before(self, generation: int) -> None:
        """Drop the values of older generations, also those that arrive later."""
        with self._changed:
            self._oldest = generation
            self._values = {key: value for key, value in self._values.items() if value[0] >= generation}


def _group_of(key: str) -> str:
    # A key begins with its group's name, which has three parts (`GroupKey.name`).
    return "/".join(key.split("/", 3)[:3])


class RendezvousStore(Store):
    """A group's view of the table: the part of the store's interface that Gloo and NCCL use."""

    def __init__(
        self,
        table: RendezvousTable,
        push: Callable[[str, bytes], None],
        timeout_s: float,
        *,
        group: str = "",
        generation: int = 0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`push` sends a key and its value to all readers. Waits end once `is_over`, when the table is woken.

        Keys that do not begin with the name of the `group` are ignored.
        """
        super().__init__()
        self._group = group
        self._table = table
        self._push = push
        self._timeout_s = timeout_s
        self._generation = generation
        self._is_over = is_over

    def set(self, key: str, value: str | bytes) -> None:
        # Torch's watchdog has signals for the whole job, which it sets past all prefixes (`broadcastSignal`). Nobody
        # here reads them, and they would stay in all members' tables.
        if not key.startswith(self._group):
            return
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._table.put(key, raw, generation=self._generation)
        self._push(key, raw)

    def get(self, key: str) -> bytes:
        (value,) = self._table.wait([key], self._timeout_s, self._is_over)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._table.wait(keys, timeout_s, self._is_over)

    def check(self, keys: list[str]) -> bool:
        return self._table.has(keys)
