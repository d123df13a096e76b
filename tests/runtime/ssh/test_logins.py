"""How many are let through to one server at a time."""

from __future__ import annotations

import trio
import trio.testing

from oobleck.runtime.ssh.login_gate import Logins


async def test_eight_at_a_time_have_their_turn_at_one_server_and_each_comes_to_it(autojump_clock):
    logins, served, most, began_s = Logins(), 0, 0, trio.current_time()
    under_way: set[int] = set()

    async def log_in(number: int) -> None:
        nonlocal served, most
        async with logins.turn("one"):
            under_way.add(number)
            most = max(most, len(under_way))
            await trio.sleep(1)
            under_way.remove(number)
            served += 1

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(log_in, number)
    assert (served, most) == (20, 8)
    assert trio.current_time() - began_s == 3.0


async def test_a_server_that_does_not_answer_delays_nobody_at_another():
    logins = Logins()
    async with trio.open_nursery() as nursery:

        async def wait_for_ever() -> None:
            async with logins.turn("silent"):
                await trio.sleep_forever()

        for _ in range(20):
            nursery.start_soon(wait_for_ever)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(30):
            async with logins.turn("other"):
                pass
        nursery.cancel_scope.cancel()


async def test_one_who_is_cancelled_gives_its_turn_back(autojump_clock):
    logins = Logins()
    for _ in range(20):
        with trio.move_on_after(1):
            async with logins.turn("one"):
                await trio.sleep_forever()
    with trio.fail_after(30):
        async with logins.turn("one"):
            pass


async def test_of_very_many_servers_a_hundred_or_so_have_their_turn_at_a_time(autojump_clock):
    logins, most, began_s = Logins(), 0, trio.current_time()
    under_way: set[int] = set()

    async def log_in(number: int) -> None:
        nonlocal most
        async with logins.turn(f"server{number}"):
            under_way.add(number)
            most = max(most, len(under_way))
            await trio.sleep(1)
            under_way.remove(number)

    async with trio.open_nursery() as nursery:
        for number in range(300):
            nursery.start_soon(log_in, number)
    assert most == 128
    assert trio.current_time() - began_s == 3.0
