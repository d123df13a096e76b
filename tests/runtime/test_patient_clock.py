"""The clock of a process that may be stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from oobleck.runtime.patient_clock import PatientClock


class Watch:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def clock(watch: Watch) -> PatientClock:
    clock = PatientClock(now=watch)
    clock.start_clock()
    return clock


def test_it_counts_what_is_worked_and_slept(watch: Watch, clock: PatientClock):
    watch.now_s += 0.9
    assert clock.current_time() == 100.9
    assert clock.deadline_to_sleep_time(130.9) == pytest.approx(30.0)
    watch.now_s += 30.2
    assert clock.current_time() == pytest.approx(131.1)
    assert clock.held_up_s == 0.0


def test_it_does_not_count_for_how_long_the_process_was_stopped_asleep(watch: Watch, clock: PatientClock):
    assert clock.deadline_to_sleep_time(102.0) == 2.0
    watch.now_s += 60.0
    assert clock.current_time() == 102.0
    assert clock.held_up_s == 58.0
    watch.now_s += 0.5
    assert clock.current_time() == 102.5


def test_it_does_not_count_for_how_long_the_process_was_stopped_at_work(watch: Watch, clock: PatientClock):
    watch.now_s += 60.0
    assert clock.current_time() == 100.0


def test_a_sleep_that_has_no_end_may_take_any_time(watch: Watch, clock: PatientClock):
    clock.deadline_to_sleep_time(float("inf"))
    watch.now_s += 3600.0
    assert clock.current_time() == 3700.0


PROGRAM = """
import time, trio
from oobleck.runtime.patient_clock import PatientClock

async def main():
    print("runs", flush=True)
    with trio.move_on_after(2.5) as limit:  # SSH, a command, an answer: it comes 1 s after the process goes on
        while time.monotonic() < stopped_until_s + 1.0:
            await trio.sleep(0.1)
    print("late" if limit.cancelled_caught else "in time", flush=True)

stopped_until_s = time.monotonic() + 4.0
trio.run(main, clock=PatientClock())
"""


def test_a_process_that_is_stopped_keeps_the_time_that_it_had_left():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == "in time\n"
