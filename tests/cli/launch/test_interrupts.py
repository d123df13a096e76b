"""Interrupts while somebody waits for a run, by real signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from oobleck.cli.launch.run import Interrupts


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # the handler runs between two instructions


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_while_we_wait_each_interrupt_is_passed_on_and_raised_late():
    passed: list[int] = []
    with Interrupts(lambda: passed.append(1)) as interrupts:
        press()
        press()
    assert passed == [1, 1]
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_late()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_the_callers_own_code_it_is_raised_at_once_as_well():
    passed: list[int] = []
    with Interrupts(lambda: passed.append(1)) as interrupts:
        interrupts.is_waiting = False
        with pytest.raises(KeyboardInterrupt):
            press()
    assert passed == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_one_nothing_is_raised():
    with Interrupts(lambda: None) as interrupts:
        pass
    interrupts.raise_late()


def test_a_handler_of_the_programs_own_is_left_alone():
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    with Interrupts(lambda: None) as interrupts:
        press()
    assert (heard, interrupts.num) == ([signal.SIGINT], 0)


def test_other_threads_have_no_interrupts():
    def wait() -> None:
        with Interrupts(lambda: None):
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
