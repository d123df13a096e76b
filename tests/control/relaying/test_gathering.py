"""What relays merge, and what they may not."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.protocol import (
    AgentMessage,
    Heartbeat,
    RelayHeard,
    RelaySaid,
    StepCommitted,
    WorkerStarted,
    news_in,
    numbers_in,
)
from oobleck.control.relaying import Gathering
from oobleck.wire import FrameDecoder, encode_frame
from tests.control.steps.test_judgement import record
from tests.examples import examples

ALIVE = Heartbeat(sequence=None)
PASSES_S = 0.125


def gathering() -> Gathering:
    return Gathering(encode_frame, passes_s=PASSES_S)


def started(pid: int, device: int = 0) -> WorkerStarted:
    return WorkerStarted(device=device, pid=pid)


def understood(said: RelaySaid) -> list[tuple[int, int, AgentMessage]]:
    """(position, device, message) for each of those who say it."""
    (message,) = FrameDecoder[AgentMessage](AgentMessage).feed(said.message)
    return [(position, device, message) for position in numbers_in(said.by) for device in said.devices]


def test_nothing_is_due_before_anything_was_heard():
    assert gathering().due_s == math.inf
    assert gathering().take(1e9) == []


def test_equal_messages_are_one():
    relay = gathering()
    for position in (9, 7, 8, 12):
        for device in (1, 0):
            assert relay.hear(position, started(5, device), 1.0)
    assert relay.due_s < 1.01
    assert relay.take(relay.due_s) == [
        RelaySaid(by=((7, 3), (12, 1)), devices=(0, 1), message=encode_frame(started(5)), news="")
    ]
    assert relay.due_s == math.inf


def test_messages_wait_for_their_like_a_few_milliseconds():
    relay = gathering()
    relay.hear(7, started(5), 1.0)
    assert relay.take(1.001) == []
    assert len(relay.take(relay.due_s)) == 1


def test_who_was_heard_is_said_with_its_age():
    relay = gathering()
    relay.hear(7, ALIVE, 1.0)
    relay.hear(8, ALIVE, 1.1)
    relay.pass_on(9, RelayHeard(heard=((50, ((20, 2),)),)), 1.1)
    assert relay.due_s == 1.0 + PASSES_S
    (said,) = relay.take(1.2)
    assert said == RelayHeard(heard=((100, ((8, 1),)), (150, ((20, 2),)), (200, ((7, 1),))))


def test_ages_are_never_too_young():
    relay = gathering()
    relay.hear(7, ALIVE, 1.0)
    (said,) = relay.take(1.1251)
    assert isinstance(said, RelayHeard)
    assert said.heard[0][0] >= 126


def test_news_are_passed_on_once():
    relay = gathering()
    step = StepCommitted(device=0, record=record(17))
    assert relay.hear(7, step, 1.0)
    assert not relay.hear(8, step, 1.0)
    other = RelaySaid(by=((30, 1),), devices=(0,), message=encode_frame(step), news=news_in(step))
    assert not relay.pass_on(9, other, 1.0)
    assert relay.source_of(news_in(step)) == 7
    assert [said.by for said in relay.take(2.0) if isinstance(said, RelaySaid)] == [((7, 1),)]
    relay.forget()
    assert relay.hear(8, step, 1.0), "the first may be lost"


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 2)), max_size=20), st.integers(0, 20))
def test_every_agent_is_heard_once_and_in_order(spoken: list[tuple[int, int, int]], cut: int):
    """Whatever agents say, directly or through another relay before."""
    relay, other = gathering(), gathering()
    for position, device, pid in spoken[:cut]:
        other.hear(position, started(pid, device), 1.0)
    for said in other.take(2.0):
        relay.pass_on(0, said, 2.0)
    for position, device, pid in spoken[cut:]:
        relay.hear(position, started(pid, device), 2.0)
    heard = [each for said in relay.take(3.0) if isinstance(said, RelaySaid) for each in understood(said)]
    for position in range(4):
        for device in range(2):
            expected = [pid for by, on, pid in spoken if (by, on) == (position, device)]
            assert [m.pid for by, on, m in heard if (by, on) == (position, device)] == expected
        # Those of different workers of a node may change places only where they say the same.
        pids = [m.pid for by, _, m in heard if by == position]
        assert pids == [pid for by, _, pid in spoken if by == position]
