"""Waits that the control thread can end.

Nothing in torch wakes a thread that waits for a peer which froze (`ProcessGroupGloo.abort` does not), so the
training thread never blocks in torch: helper threads do, and the training thread waits here, for them or for
a reason to give up. What it gives up is left behind with its helper thread, until what that waits for has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import torch

from oobleck.control.steps import Interrupted
from oobleck.planner import WorkerId

from .devices import start_thread

_CPU = torch.device("cpu")

T = TypeVar("T")


@dataclass(slots=True)
class Calls(Generic[T]):
    """Calls that were begun at once."""

    number: int
    outcomes: dict[int, T] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    are_over: bool = False
    """Nobody waits for them any more."""

    @property
    def are_done(self) -> bool:
        """All have returned, or one has failed."""
        return bool(self.failures) or len(self.outcomes) == self.number


@dataclass(frozen=True, slots=True)
class Mark:
    """How far the training thread has got, for `Waiter.has_come_on`."""

    waits: bool
    begun: int
    """Waits that it has begun."""
    ready: int
    """Waits that ended with what they were for."""


class Waiter:
    """One condition that everything the training thread can wait for is announced on."""

    def __init__(self, device: torch.device = _CPU) -> None:
        """`device` is where the threads that it starts compute."""
        self.device = device
        self._changed = threading.Condition()
        self.waits_for: tuple[WorkerId, ...] = ()
        """Whose part the training thread waits for; none while it computes."""
        self.waited_s = 0.0
        """How long it has waited so far."""
        self._longest_s = (0.0, 0.0)
        self._mark = Mark(waits=False, begun=0, ready=0)

    @property
    def mark(self) -> Mark:
        """How far the training thread has got. Any thread may ask."""
        return self._mark

    def has_come_on(self, since: Mark) -> bool:
        """Whether it has got further: from what it computed to a wait, or from a wait by what that was for."""
        return self._mark.ready > since.ready if since.waits else self._mark.begun > since.begun

    def take_longest_s(self) -> tuple[float, float]:
        """Return when the longest wait began and ended of those since this was last asked, by the monotonic clock."""
        longest_s, self._longest_s = self._longest_s, (0.0, 0.0)
        return longest_s

    def announce(self) -> None:
        """Wake the waiters, so that they look at what they wait for again. Any thread may call this."""
        with self._changed:
            self._changed.notify_all()

    def wait(
        self,
        ready: Callable[[], bool],
        interrupted: Callable[[], bool],
        waits_for: Iterable[WorkerId] = (),
        *,
        poll_s: float | None = None,
    ) -> None:
        """Wait until `ready`; raise Interrupted once `interrupted`, unless it is ready as well.

        `waits_for` are the workers without whose part it never is. With `poll_s`, it is looked at that often, beside
        what is announced. For the training thread alone.
        """
        began_s = time.monotonic()
        self.waits_for = tuple(waits_for)
        self._mark = replace(self._mark, waits=True, begun=self._mark.begun + 1)
        with self._changed:
            while not self._changed.wait_for(lambda: ready() or interrupted(), poll_s):
                pass
            self.waits_for = ()
            ended_s = time.monotonic()
            self.waited_s += ended_s - began_s
            if ended_s - began_s > self._longest_s[1] - self._longest_s[0]:
                self._longest_s = (began_s, ended_s)
            is_ready = ready()
            self._mark = replace(self._mark, waits=False, ready=self._mark.ready + is_ready)
            if not is_ready:
                raise Interrupted

    def call(self, blocking: Callable[[], T], interrupted: Callable[[], bool], waits_for: Iterable[WorkerId] = ()) -> T:
        """Call `blocking` on a thread of its own and return what it returns, or raise what it raises.

        Raises Interrupted once `interrupted`; the thread is left behind. `waits_for` as in `wait`.
        """
        (outcome,) = self.call_all([blocking], interrupted, waits_for)
        return outcome

    def call_all(
        self, blocking: Sequence[Callable[[], T]], interrupted: Callable[[], bool], waits_for: Iterable[WorkerId] = ()
    ) -> list[T]:
        """Call all at once, each on a thread of its own; return what they return, or raise what one raises first.

        Raises Interrupted once `interrupted`; what still runs is left behind then, and after a failure. `waits_for`
        as in `wait`.
        """
        return self.end(self.begin(blocking), interrupted, waits_for)

    def begin(self, blocking: Sequence[Callable[[], T]]) -> Calls[T]:
        """Call all at once, each on a thread of its own. `end` waits for them, unless they are left behind."""
        calls: Calls[T] = Calls(len(blocking))

        def run(index: int) -> None:
            try:
                calls.outcomes[index] = blocking[index]()
            except BaseException as error:  # noqa: BLE001  handed to the waiting thread
                with self._changed:
                    if not calls.are_over:
                        calls.failures.append(error)
            self.announce()

        for index in range(len(blocking)):
            start_thread(partial(run, index), name="abandonable", device=self.device)
        return calls

    def end(self, calls: Calls[T], interrupted: Callable[[], bool], waits_for: Iterable[WorkerId] = ()) -> list[T]:
        """Wait for what `begin` has called, and return or raise as `call_all`."""
        try:
            self.wait(lambda: calls.are_done, interrupted, waits_for)
            if calls.failures:
                raise calls.failures[0]
            return [calls.outcomes[index] for index in range(calls.number)]
        finally:
            with self._changed:  # an error that is kept would keep, by its traceback, what was being waited for
                calls.are_over = True
                calls.failures.clear()
