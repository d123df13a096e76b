"""When silence is judged: never late, and without a look at all nodes for each message."""

from __future__ import annotations

from random import Random

import pytest

from oobleck.control.events import Turn
from oobleck.control.nodes import Membership
from oobleck.control.nodes.silence import Silence
from oobleck.job import ControlSpec, NodeSpec
from tests.control.bench import hello

CONTROL = ControlSpec(heartbeat_interval_s=1.0, lease_s=5.0)
NAMES = ("a", "b", "c")


@pytest.fixture
def members() -> Membership:
    members = Membership.of(tuple(NodeSpec(name=name, host=name) for name in NAMES))
    for name in NAMES:
        members.meet(name, hello(name), address=name, now_s=10.0)
    return members


def exactly(members: Membership) -> float:
    return min(members.heard_s[name] for name in members.living_names) + CONTROL.lease_s


def test_one_who_speaks_makes_no_judgement_later_before_all_are_counted_again(members: Membership):
    silence = Silence(CONTROL, members)
    assert silence.due_s == 15.0
    for name in NAMES:
        members.hear_node(name, 12.0)
    assert silence.due_s == 15.0
    assert silence.take_silent(Turn(15.0)) == {}
    assert silence.due_s == 17.0


def test_one_who_is_met_again_by_a_new_master_may_be_the_first_to_lapse(members: Membership):
    silence = Silence(CONTROL, members)
    members.expect_words(60.0)
    silence.recount()
    assert silence.due_s == 65.0
    members.meet("b", hello("b"), address="b", now_s=20.0)
    assert silence.due_s == 25.0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_silence_is_judged_late(members: Membership, seed: int):
    rng, silence, now_s = Random(seed), Silence(CONTROL, members), 10.0
    for _ in range(100):
        now_s += rng.random()
        name = rng.choice(NAMES)
        match rng.randrange(6):
            case 0 | 1:
                members.hear_node(name, now_s)
            case 2:
                members.hear_nodes([(name, now_s - rng.random()), ("a", now_s)])
            case 3 if name in members.living_names:
                members.meet(name, hello(name), address=name, now_s=now_s)
            case 4 if len(members.living_names) > 1 and name in members.living_names:
                members.lose(name)
                members.add(NodeSpec(name=name, host=name))
            case 5 if name not in members.living_names:
                members.meet(name, hello(name), address=name, now_s=now_s)
        assert silence.due_s <= exactly(members)
        if rng.random() < 0.3:
            silence.recount()
            assert silence.due_s == exactly(members)
