"""What an agent says is said until it is heard."""

from __future__ import annotations

import trio

from oobleck.control.protocol.messages import Finished, Heartbeat, Pace, StorePut
from oobleck.roles.letters import Letters


def word(number: int) -> Finished:
    return Finished(device=0, applied=number)


async def test_what_no_answered_heartbeat_follows_is_said_again():
    letters = Letters(limit=100)
    letters.add(word(1))
    letters.beat()
    letters.add(word(2))
    letters.beat()
    assert letters.take() == [word(1), Heartbeat(sequence=0), word(2), Heartbeat(sequence=1)]
    letters.heard(0)
    letters.add(word(3))
    letters.repeat_unheard()
    assert letters.take() == [word(2), word(3)]


async def test_heartbeats_ask_for_answers_where_something_may_not_be_heard_or_where_they_are_to():
    letters = Letters(limit=100)
    letters.beat()
    letters.beat(asks=True)
    assert letters.take() == [Heartbeat(sequence=None), Heartbeat(sequence=0)]
    letters.beat()
    assert letters.take() == [Heartbeat(sequence=1)]  # nobody has answered the one before
    letters.heard(1)
    letters.beat()
    assert letters.take() == [Heartbeat(sequence=None)]
    letters.add(word(1))
    letters.beat()
    assert letters.take() == [word(1), Heartbeat(sequence=2)]


async def test_an_answer_that_nobody_waits_for_forgets_nothing():
    letters = Letters(limit=100)
    letters.add(word(1))
    letters.take()
    letters.heard(7)
    letters.repeat_unheard()
    assert letters.take() == [word(1)]


async def test_who_waits_is_woken_by_the_next_word(autojump_clock):
    letters = Letters(limit=100)
    heard = []

    async def listen() -> None:
        await letters.wait()
        heard.extend(letters.take())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.sleep(1)
        letters.add(word(1))
    assert heard == [word(1)]


async def test_the_oldest_words_are_dropped_when_a_master_is_away_for_long():
    letters = Letters(limit=3)
    for number in range(5):
        letters.add(word(number))
    assert letters.take() == [word(2), word(3), word(4)]


async def test_keys_of_a_rendezvous_are_repeated_too():
    letters = Letters(limit=3)
    put = StorePut(key="k", value=b"v", nodes=("n1",))
    letters.add(put)
    letters.take()
    letters.repeat_unheard()
    assert letters.take() == [put]


PACE = Pace(device=0, compute_s=0.5, microbatches=4)


async def test_a_word_in_passing_waits_for_the_next_one_to_go_along_with(autojump_clock):
    letters = Letters(limit=100)
    letters.add_in_passing(PACE)
    with trio.move_on_after(10) as waiting:
        await letters.wait()
    assert waiting.cancelled_caught
    letters.beat()
    with trio.fail_after(0):
        await letters.wait()
    assert letters.take() == [PACE, Heartbeat(sequence=None)]


async def test_a_word_in_passing_asks_for_no_answer_and_is_never_said_again():
    letters = Letters(limit=100)
    letters.add(word(1))
    letters.add_in_passing(PACE)
    assert letters.take() == [word(1), PACE]
    letters.add_in_passing(PACE)
    letters.beat()
    assert letters.take() == [PACE, Heartbeat(sequence=0)]
    letters.heard(0)
    letters.add_in_passing(PACE)
    letters.beat()
    assert letters.take() == [PACE, Heartbeat(sequence=None)]  # the word that was to be heard is heard
    letters.add_in_passing(PACE)
    letters.repeat_unheard()
    assert letters.take() == []


async def test_the_end_does_not_wait_for_words_in_passing(autojump_clock):
    letters = Letters(limit=100)
    letters.add(word(1))
    letters.take()
    letters.add_in_passing(PACE)
    letters.note_sent()
    with trio.fail_after(0):
        await letters.all_said()
