"""What an agent says is said until it is heard."""

from __future__ import annotations

import trio

from oobleck.control.protocol import Finished, Heartbeat, Pace
from oobleck.roles.resend_queue import ResendQueue


def word(number: int) -> Finished:
    return Finished(device=0, applied=number)


async def test_what_no_answered_heartbeat_follows_is_said_again():
    resend_queue = ResendQueue(limit=100)
    resend_queue.add(word(1))
    resend_queue.beat()
    resend_queue.add(word(2))
    resend_queue.beat()
    assert resend_queue.take() == [word(1), Heartbeat(sequence=0), word(2), Heartbeat(sequence=1)]
    resend_queue.heard(0)
    resend_queue.add(word(3))
    resend_queue.repeat_unheard()
    assert resend_queue.take() == [word(2), word(3)]


async def test_heartbeats_ask_for_answers_where_something_may_not_be_heard_or_where_they_are_to():
    resend_queue = ResendQueue(limit=100)
    resend_queue.beat()
    resend_queue.beat(asks=True)
    assert resend_queue.take() == [Heartbeat(sequence=None), Heartbeat(sequence=0)]
    resend_queue.beat()
    assert resend_queue.take() == [Heartbeat(sequence=1)]  # nobody has answered the one before
    resend_queue.heard(1)
    resend_queue.beat()
    assert resend_queue.take() == [Heartbeat(sequence=None)]
    resend_queue.add(word(1))
    resend_queue.beat()
    assert resend_queue.take() == [word(1), Heartbeat(sequence=2)]


async def test_an_answer_that_nobody_waits_for_forgets_nothing():
    resend_queue = ResendQueue(limit=100)
    resend_queue.add(word(1))
    resend_queue.take()
    resend_queue.heard(7)
    resend_queue.repeat_unheard()
    assert resend_queue.take() == [word(1)]


async def test_who_waits_is_woken_by_the_next_word(autojump_clock):
    resend_queue = ResendQueue(limit=100)
    heard = []

    async def listen() -> None:
        await resend_queue.wait()
        heard.extend(resend_queue.take())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.sleep(1)
        resend_queue.add(word(1))
    assert heard == [word(1)]


async def test_the_oldest_words_are_dropped_when_a_master_is_away_for_long():
    resend_queue = ResendQueue(limit=3)
    for number in range(5):
        resend_queue.add(word(number))
    assert resend_queue.take() == [word(2), word(3), word(4)]


PACE = Pace(device=0, compute_s=0.5, microbatches=4)


async def test_a_word_in_passing_waits_for_the_next_one_to_go_along_with(autojump_clock):
    resend_queue = ResendQueue(limit=100)
    resend_queue.add_in_passing(PACE)
    with trio.move_on_after(10) as waiting:
        await resend_queue.wait()
    assert waiting.cancelled_caught
    resend_queue.beat()
    with trio.fail_after(30):
        await resend_queue.wait()
    assert resend_queue.take() == [PACE, Heartbeat(sequence=None)]


async def test_a_word_in_passing_asks_for_no_answer_and_is_never_said_again():
    resend_queue = ResendQueue(limit=100)
    resend_queue.add(word(1))
    resend_queue.add_in_passing(PACE)
    assert resend_queue.take() == [word(1), PACE]
    resend_queue.add_in_passing(PACE)
    resend_queue.beat()
    assert resend_queue.take() == [PACE, Heartbeat(sequence=0)]
    resend_queue.heard(0)
    resend_queue.add_in_passing(PACE)
    resend_queue.beat()
    assert resend_queue.take() == [PACE, Heartbeat(sequence=None)]  # the word that was to be heard is heard
    resend_queue.add_in_passing(PACE)
    resend_queue.repeat_unheard()
    assert resend_queue.take() == []


async def test_the_end_does_not_wait_for_words_in_passing(autojump_clock):
    resend_queue = ResendQueue(limit=100)
    resend_queue.add(word(1))
    resend_queue.take()
    resend_queue.add_in_passing(PACE)
    resend_queue.note_sent()
    with trio.fail_after(30):
        await resend_queue.all_said()
