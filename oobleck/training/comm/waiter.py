"""Waits that the control thread can end.

Nothing in torch wakes a thread that waits for a frozen peer (`ProcessGroupGloo.abort` does not), so the training thread
never blocks in torch. Helper threads do, and the training thread waits here, for them or for a reason to give up. It
leaves a helper thread behind when it gives up, until whatever that thread waits for has ended.
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
    """Calls that were begun at the same time."""

    number: int
    outcomes: dict[int, T] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    are_over: bool = False  # whether no thread waits for them any more

    @property
    def are_done(self) -> bool:
        """Whether all have returned, or one has failed."""
        return bool(self.failures) or len(self.outcomes) == self.number


@dataclass(frozen=True, slots=True)
class Mark:
    """The training thread's progress, for `Waiter.has_come_on`."""

    waits: bool
    begun: int  # waits so far
    ready: int  # successful waits so far


class Waiter:
    """One condition that everything the training thread can wait for is announced on."""

    def __init__(self, device: torch.device = _CPU) -> None:
        """`device` is the default device of the threads that it starts."""
        self.device = device
        self._changed = threading.Condition()
        self.waits_for: tuple[WorkerId, ...] = ()
        """The workers that the training thread waits for; none while it computes."""
        self.waited_s = 0.0
        self._longest_s = (0.0, 0.0)
        self.mark = Mark(waits=False, begun=0, ready=0)

    def has_come_on(self, since: Mark) -> bool:
        """Return whether it has progressed: from computation to a wait, or past a wait because that succeeded."""
        return self.mark.ready > since.ready if since.waits else self.mark.begun > since.begun

    def take_longest_s(self) -> tuple[float, float]:
        """Return when the longest wait since the last call began and ended, by the monotonic clock."""
        longest_s, self._longest_s = self._longest_s, (0.0, 0.0)
        return longest_s

    def announce(self) -> None:
        """Wake the waiters to check their conditions again. Any thread may call this."""
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
        """Wait until `ready`. Raises Interrupted once `interrupted`, unless it is ready as well.

        `waits_for` names the workers that have to contribute. With `poll_s`, the conditions are also checked at this
        interval, not only on `announce`, and `ready` is not asked once `interrupted`. For the training thread alone.
        """
        began_s = time.monotonic()
        self.waits_for = tuple(waits_for)
        # Marks are replaced as a whole, because the control thread reads them without the lock.
        self.mark = replace(self.mark, waits=True, begun=self.mark.begun + 1)
        is_ready = False

        def is_over() -> bool:
            nonlocal is_ready
            # What has to be polled is on a GPU, where whatever ended the wait may be ending it too.
            if poll_s is not None and interrupted():
                return True
            is_ready = ready()
            return is_ready or interrupted()

        with self._changed:
            # With `poll_s`, this returns False at each interval.
            while not self._changed.wait_for(is_over, poll_s):
                pass
            self.waits_for = ()
            ended_s = time.monotonic()
            self.waited_s += ended_s - began_s
            if ended_s - began_s > self._longest_s[1] - self._longest_s[0]:
                self._longest_s = (began_s, ended_s)
            self.mark = replace(self.mark, waits=False, ready=self.mark.ready + is_ready)
            if not is_ready:
                raise Interrupted

    def call(self, blocking: Callable[[], T], interrupted: Callable[[], bool], waits_for: Iterable[WorkerId] = ()) -> T:
        """Call `blocking` on a thread of its own; return its outcome or raise its error. Otherwise as `call_all`."""
        (outcome,) = self.call_all([blocking], interrupted, waits_for)
        return outcome

    def call_all(
        self, blocking: Sequence[Callable[[], T]], interrupted: Callable[[], bool], waits_for: Iterable[WorkerId] = ()
    ) -> list[T]:
        """Call all at once, each on a thread of its own, and return their outcomes or raise the first error.

        Raises Interrupted once `interrupted`. Then, and after an error, it leaves running threads behind. `waits_for`
        as in `wait`.
        """
        return self.end(self.begin(blocking), interrupted, waits_for)

    def begin(self, blocking: Sequence[Callable[[], T]]) -> Calls[T]:
        """Call all at once, each on a thread of its own. `end` waits for them."""
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
        """Wait for the calls of `begin`, and return or raise as `call_all`."""
        try:
            self.wait(lambda: calls.are_done, interrupted, waits_for)
            if calls.failures:
                raise calls.failures[0]
            return [calls.outcomes[index] for index in range(calls.number)]
        finally:
            # Threads left behind keep `calls`; the traceback of an error in it would keep this wait's objects alive.
            with self._changed:
                calls.are_over = True
                calls.failures.clear()
