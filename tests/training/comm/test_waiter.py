"""Whether a training thread comes on, as other threads see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from oobleck.control.steps import Interrupted
from oobleck.planner import WorkerId
from oobleck.training.comm.waiter import Waiter

PEER = WorkerId(node="n1", device=0)


def never() -> bool:
    return False


def always() -> bool:
    return True


def seen_while_it_waits(waiter: Waiter, look: Callable[[], None], *, ends: bool) -> None:
    """Call `look` from another thread in the middle of a wait, which ends with what it was for or is interrupted."""
    over = threading.Event()

    def watch() -> None:
        while not waiter.mark.waits:
            time.sleep(0.001)
        look()
        over.set()
        waiter.announce()

    watcher = threading.Thread(target=watch)
    watcher.start()
    waiter.wait(lambda: ends and over.is_set(), over.is_set, (PEER,))
    watcher.join()


def test_who_computes_comes_on_with_its_next_wait():
    waiter = Waiter()
    waiter.wait(always, never)
    asked = waiter.mark
    assert not waiter.has_come_on(asked), "it computes"
    with pytest.raises(Interrupted):
        waiter.wait(never, always)
    assert waiter.has_come_on(asked)


def test_who_waits_comes_on_with_what_it_waits_for():
    waiter = Waiter()
    seen = []
    seen_while_it_waits(waiter, lambda: seen.append((waiter.mark, waiter.has_come_on(waiter.mark))), ends=True)
    ((asked, at_once),) = seen
    assert not at_once
    assert waiter.has_come_on(asked)


def test_who_is_interrupted_does_not_come_on():
    """It waited for what no fence gives: that it is fenced, and waits for a plan, says nothing."""
    waiter = Waiter()
    seen = []
    with pytest.raises(Interrupted):
        seen_while_it_waits(waiter, lambda: seen.append(waiter.mark), ends=False)
    with pytest.raises(Interrupted):
        waiter.wait(never, always)
    assert not waiter.has_come_on(seen[0])


def test_what_has_to_be_polled_is_not_asked_once_the_wait_is_interrupted():
    """It is on a GPU, where asking may wait for what is being aborted."""
    waiter, asked = Waiter(), []

    def ready() -> bool:
        asked.append(len(asked))
        return False

    with pytest.raises(Interrupted):
        waiter.wait(ready, always, poll_s=1e-3)
    assert asked == []
    with pytest.raises(Interrupted):
        waiter.wait(ready, lambda: len(asked) > 2, poll_s=1e-3)
    assert asked == [0, 1, 2]
    waiter.wait(always, never, poll_s=1e-3)
