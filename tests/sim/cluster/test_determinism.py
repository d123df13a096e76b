"""One seed, one order of events, in any process; and never for ever."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import trio

from oobleck.sim.cluster.determinism import Livelock, VirtualTime, run_virtual

SHUFFLED = """
import trio
from oobleck.sim.cluster.determinism import run_virtual

async def main():
    order = []
    async def wait(number):
        with trio.move_on_after(number % 3):
            await trio.sleep(2)
        order.append(number)
    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(wait, number)
    return order

print(run_virtual(main, seed={seed}, horizon_s=10))
"""


def order_in_another_process(*, seed: int, hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    code = SHUFFLED.format(seed=seed)
    return subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout


def test_the_order_is_the_seeds_in_any_process_under_any_hash_seed():
    orders = [order_in_another_process(seed=7, hash_seed=hash_seed) for hash_seed in ("0", "1", "2", "random")]
    assert len(set(orders)) == 1
    assert order_in_another_process(seed=8, hash_seed="0") != orders[0]


def test_trio_has_its_knobs_where_they_are_turned():
    """When this fails, trio has moved its private knobs: find the new ones before anything else."""
    assert isinstance(trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING, bool)
    assert isinstance(trio._core._run._r, random.Random)


def test_a_trio_without_the_knobs_is_told_of_loudly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING")
    with pytest.raises(RuntimeError, match="_ALLOW_DETERMINISTIC_SCHEDULING"):
        run_virtual(trio.lowlevel.checkpoint, seed=0, horizon_s=1)


def test_the_knobs_are_left_as_they_were():
    state, allowed = trio._core._run._r.getstate(), trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING
    run_virtual(trio.lowlevel.checkpoint, seed=0, horizon_s=1)
    assert trio._core._run._r.getstate() == state
    assert allowed == trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING


def test_a_standstill_ends_at_the_horizon():
    with pytest.raises(trio.TooSlowError):
        run_virtual(trio.sleep_forever, seed=0, horizon_s=1e6)


def test_an_hour_takes_no_time():
    async def main() -> float:
        await trio.sleep(3600)
        return trio.current_time()

    assert run_virtual(main, seed=0, horizon_s=1e4) == 3600


def test_tasks_that_keep_one_another_busy_are_found_out():
    async def main() -> None:
        await trio.sleep(7)
        while True:
            await trio.lowlevel.checkpoint()

    with pytest.raises(Livelock, match="at 7 s"):
        run_virtual(main, seed=0, horizon_s=1e6)


def test_calls_are_made_at_their_times_and_in_their_order():
    time, calls = VirtualTime(), []
    time.call_at(2.0, lambda: calls.append(("b", time.now_s)))
    time.call_at(2.0, lambda: calls.append(("c", time.now_s)))
    time.call_at(1.0, lambda: calls.append(("a", time.now_s)))

    async def main() -> None:
        await trio.sleep(1.5)
        time.call_at(0.5, lambda: calls.append(("late", time.now_s)))
        await trio.sleep(1.5)

    run_virtual(main, seed=0, horizon_s=10, time=time)
    assert calls == [("a", 1.0), ("late", 1.5), ("b", 2.0), ("c", 2.0)]


def test_who_is_woken_by_a_call_goes_on_beside_whom_a_deadline_wakes():
    time, woken = VirtualTime(), trio.Event()
    time.call_at(3.0, woken.set)

    async def main() -> list[float]:
        went_on = []
        with trio.move_on_at(3.0):
            await woken.wait()
            went_on.append(trio.current_time())
        await trio.sleep(1.0)
        return [*went_on, trio.current_time()]

    assert run_virtual(main, seed=0, horizon_s=10, time=time) == [3.0, 4.0]


def test_time_waits_for_whoever_waits_for_all_others_to_be_blocked():
    async def main() -> float:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 5)
            await trio.testing.wait_all_tasks_blocked()
            began_s = trio.current_time()
        return trio.current_time() - began_s

    assert run_virtual(main, seed=0, horizon_s=10) == 5.0
