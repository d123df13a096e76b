"""When silence is judged: never late, and without a look at all nodes for each message."""

from __future__ import annotations

from random import Random

import pytest

from oobleck.control.nodes import Membership
from oobleck.control.nodes.leases import Leases
from oobleck.job import ControlSpec, NodeSpec
from tests.control.bench import hello

CONTROL = ControlSpec(heartbeat_interval_s=1.0, lease_s=5.0)
NAMES = ("a", "b", "c")


@pytest.fixture
def members() -> Membership:
    members = Membership(tuple(NodeSpec(name=name, host=name) for name in NAMES))
    for name in NAMES:
        members.meet(name, hello(name), address=name, now_s=10.0)
    return members


def exactly(members: Membership) -> float:
    return min(members.heard_s[name] for name in members.living_names) + CONTROL.lease_s


def test_one_who_speaks_makes_no_judgement_later_before_all_are_counted_again(members: Membership):
    leases = Leases(CONTROL, members)
    assert leases.due_s == 15.0
    for name in NAMES:
        members.hear_node(name, 12.0)
    assert leases.due_s == 15.0
    assert leases.take_lapsed(15.0) == {}
    assert leases.due_s == 17.0


def test_one_who_is_met_again_by_a_new_master_may_be_the_first_to_lapse(members: Membership):
    leases = Leases(CONTROL, members)
    members.expect_words(60.0)
    leases.recount()
    assert leases.due_s == 65.0
    members.meet("b", hello("b"), address="b", now_s=20.0)
    assert leases.due_s == 25.0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_silence_is_judged_late(members: Membership, seed: int):
    rng, leases, now_s = Random(seed), Leases(CONTROL, members), 10.0
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
        assert leases.due_s <= exactly(members)
        if rng.random() < 0.3:
            leases.recount()
            assert leases.due_s == exactly(members)
