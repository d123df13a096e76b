"""Waits that an order from the control thread can end.

Nothing in torch wakes a thread that waits for a peer which froze (`ProcessGroupGloo.abort` does not), so the
training thread never blocks in torch: helper threads do, and the training thread waits here, for them or for
a reason to give up. What it gives up is left behind with its helper thread; both are daemons.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from oobleck.control.standing import Interrupted

__all__ = ["Signals"]

T = TypeVar("T")


class Signals:
    """One condition that everything the training thread can wait for is announced on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def announce(self) -> None:
        """Wake the waiters, so that they look at what they wait for again. Any thread may call this."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], interrupted: Callable[[], bool]) -> None:
        """Wait until `ready`; raise Interrupted once `interrupted`, unless it is ready as well."""
        with self._changed:
            self._changed.wait_for(lambda: ready() or interrupted())
            if not ready():
                raise Interrupted

    def call(self, blocking: Callable[[], T], interrupted: Callable[[], bool]) -> T:
        """Call `blocking` on a thread of its own and return what it returns, or raise what it raises.

        Raises Interrupted once `interrupted`; the thread is left behind.
        """
        outcome: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(blocking())
            except BaseException as error:  # noqa: BLE001  handed to the waiting thread
                failure.append(error)
            self.announce()

        threading.Thread(target=run, daemon=True, name="abandonable").start()
        self.wait(lambda: bool(outcome or failure), interrupted)
        if failure:
            raise failure[0]
        return outcome[0]
