"""Which copies of a layer are wrong."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.commit.replica_check import Comparing, odd_ones
from oobleck.control.events.effects import Outbox
from oobleck.control.protocol.messages import ReplicaDigests
from oobleck.planner import Place

PLACES = tuple(Place(node=f"n{index}", device=0) for index in range(5))


def say(comparing: Comparing, step: int, digests: dict[Place, dict[int, int]]) -> dict[Place, frozenset[int]]:
    answer: dict[Place, frozenset[int]] = {}
    for place, layers in digests.items():
        message = ReplicaDigests(
            device=0, step=step, generation=1, layers=tuple(layers), digests=tuple(layers.values())
        )
        answer = comparing.take(place, message, digests.keys())
    return answer


def texts(outbox: Outbox) -> list[str]:
    return [command.entry.text for command in outbox.take()]


@given(count=st.integers(3, 5), wrong=st.integers(0, 4), digest=st.integers(0, 9))
def test_one_that_differs_from_all_others_is_the_odd_one(count: int, wrong: int, digest: int) -> None:
    places = PLACES[:count]
    digests = dict.fromkeys(places, digest) | {places[wrong % count]: digest + 1}
    assert odd_ones(digests) == (frozenset({places[wrong % count]}), True)


@given(st.dictionaries(st.sampled_from(PLACES), st.integers(0, 3), min_size=1))
def test_those_who_are_trusted_agree(digests: dict[Place, int]) -> None:
    odd, is_sure = odd_ones(digests)
    trusted = [digest for place, digest in digests.items() if place not in odd]
    assert len(set(trusted)) == 1
    assert is_sure == (len(trusted) > len(odd))


def test_equal_copies_are_left_alone() -> None:
    outbox = Outbox()
    assert say(Comparing(outbox), 100, {PLACES[0]: {0: 5, 1: 6}, PLACES[1]: {0: 5}, PLACES[2]: {1: 6}}) == {}
    assert texts(outbox) == []


def test_the_odd_one_of_three_is_named_and_its_layer_alone_distrusted() -> None:
    outbox = Outbox()
    copies = {place: {0: 5, 1: 6} for place in PLACES[:3]} | {PLACES[1]: {0: 5, 1: 7}}
    assert say(Comparing(outbox), 100, copies) == {PLACES[1]: frozenset({1})}
    (text,) = texts(outbox)
    assert "after step 100 layer 1 on n1:0 differs from that on n0:0, n2:0" in text
    assert "n1:0 computed or kept it wrongly" in text


def test_of_two_that_differ_both_are_named() -> None:
    outbox = Outbox()
    assert say(Comparing(outbox), 100, {PLACES[0]: {0: 5}, PLACES[1]: {0: 6}}) == {PLACES[1]: frozenset({0})}
    assert "nobody can tell which is right" in texts(outbox)[0]


def test_an_incomplete_comparison_is_dropped_for_a_newer_one() -> None:
    comparing = Comparing(Outbox())
    late = ReplicaDigests(device=0, step=100, generation=1, layers=(0,), digests=(1,))
    assert comparing.take(PLACES[0], late, PLACES[:2]) == {}
    assert say(comparing, 200, {place: {0: 2} for place in PLACES[:2]}) == {}
    assert comparing.take(PLACES[1], late, PLACES[:2]) == {}


def test_machines_that_always_differ_are_compared_no_more() -> None:
    outbox = Outbox()
    comparing = Comparing(outbox)
    answers = [say(comparing, step, {PLACES[0]: {0: 1}, PLACES[1]: {0: 2}}) for step in (100, 200, 300, 400)]
    assert [bool(answer) for answer in answers] == [True, True, False, False]
    assert "compared no more" in texts(outbox)[-1]


def test_devices_that_share_stages_are_compared_with_those_of_like_rank() -> None:
    """Two stages of two devices each: ranks have different parts, and one of four copies of the first is wrong."""
    outbox = Outbox()
    comparing = Comparing(outbox, degree=2)
    places = [Place(node=node, device=device) for node in ("n0", "n1", "n2") for device in range(2)]
    right = {place: {3: 10 + place.device} for place in places}
    assert say(comparing, 1, right) == {}
    assert texts(outbox) == []
    wrong = right | {places[2]: {3: 77}}
    assert say(comparing, 2, wrong) == {places[2]: frozenset({3})}
