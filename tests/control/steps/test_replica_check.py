"""Which copies of a layer are wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.events import Record, Turn
from oobleck.control.journal import JournalEntry, Notice, ReplicasDiffer
from oobleck.control.protocol import ReplicaDigests
from oobleck.control.steps.replica_check import ReplicaCheck, odd_ones
from oobleck.planner import WorkerId

Compared = tuple[list[JournalEntry], Mapping[WorkerId, frozenset[int]]]
PLACES = tuple(WorkerId(node=f"n{index}", device=0) for index in range(5))


def say(replica_check: ReplicaCheck, step: int, digests: dict[WorkerId, dict[int, int]]) -> Compared:
    """What follows from the last of these."""
    answer: Compared = [], {}
    for worker_id, layers in digests.items():
        message = ReplicaDigests(
            device=0, step=step, generation=1, layers=tuple(layers), digests=tuple(layers.values())
        )
        answer = take(replica_check, worker_id, message, digests)
    return answer


def take(
    replica_check: ReplicaCheck, worker_id: WorkerId, message: ReplicaDigests, worker_ids: Iterable[WorkerId]
) -> Compared:
    turn = Turn(0.0)
    replaced = replica_check.take(turn, worker_id, message, list(worker_ids))
    return [command.entry for command in turn.commands if isinstance(command, Record)], replaced


def entries(effects: Compared) -> list[JournalEntry]:
    return effects[0]


def distrusted(effects: Compared) -> dict[WorkerId, frozenset[int]]:
    return dict(effects[1])


@given(count=st.integers(3, 5), wrong=st.integers(0, 4), digest=st.integers(0, 9))
def test_one_that_differs_from_all_others_is_the_odd_one(count: int, wrong: int, digest: int) -> None:
    worker_ids = PLACES[:count]
    digests = dict.fromkeys(worker_ids, digest) | {worker_ids[wrong % count]: digest + 1}
    assert odd_ones(digests) == (frozenset({worker_ids[wrong % count]}), True)


@given(st.dictionaries(st.sampled_from(PLACES), st.integers(0, 3), min_size=1))
def test_those_who_are_trusted_agree(digests: dict[WorkerId, int]) -> None:
    odd, is_sure = odd_ones(digests)
    trusted = [digest for worker_id, digest in digests.items() if worker_id not in odd]
    assert len(set(trusted)) == 1
    assert is_sure == (len(trusted) > len(odd))


def test_equal_copies_are_left_alone() -> None:
    assert say(ReplicaCheck(), 100, {PLACES[0]: {0: 5, 1: 6}, PLACES[1]: {0: 5}, PLACES[2]: {1: 6}}) == ([], {})


def test_the_odd_one_of_three_is_named_and_its_layer_alone_distrusted() -> None:
    copies = {worker_id: {0: 5, 1: 6} for worker_id in PLACES[:3]} | {PLACES[1]: {0: 5, 1: 7}}
    effects = say(ReplicaCheck(), 100, copies)
    assert distrusted(effects) == {PLACES[1]: frozenset({1})}
    (entry,) = entries(effects)
    assert entry == ReplicasDiffer(
        t_s=0.0, step=100, layer=1, odd=(PLACES[1],), trusted=(PLACES[0], PLACES[2]), is_sure=True
    )


def test_of_two_that_differ_both_are_named() -> None:
    effects = say(ReplicaCheck(), 100, {PLACES[0]: {0: 5}, PLACES[1]: {0: 6}})
    assert distrusted(effects) == {PLACES[1]: frozenset({0})}
    (entry,) = entries(effects)
    assert isinstance(entry, ReplicasDiffer)
    assert (entry.odd, entry.trusted, entry.is_sure) == ((PLACES[1],), (PLACES[0],), False)


def test_an_incomplete_comparison_is_dropped_for_a_newer_one() -> None:
    replica_check = ReplicaCheck()
    late = ReplicaDigests(device=0, step=100, generation=1, layers=(0,), digests=(1,))
    assert take(replica_check, PLACES[0], late, PLACES[:2]) == ([], {})
    assert say(replica_check, 200, {worker_id: {0: 2} for worker_id in PLACES[:2]}) == ([], {})
    assert take(replica_check, PLACES[1], late, PLACES[:2]) == ([], {})


def test_machines_that_always_differ_are_compared_no_more() -> None:
    replica_check = ReplicaCheck()
    answers = [say(replica_check, step, {PLACES[0]: {0: 1}, PLACES[1]: {0: 2}}) for step in (100, 200, 300, 400)]
    assert [bool(distrusted(answer)) for answer in answers] == [True, True, False, False]
    assert [type(entry) for entry in entries(answers[2])] == [ReplicasDiffer, Notice]
    assert answers[3] == ([], {})


def test_devices_that_share_stages_are_compared_with_those_of_like_rank() -> None:
    """Two stages of two devices each: ranks have different parts, and one of four copies of the first is wrong."""
    replica_check = ReplicaCheck(degree=2)
    worker_ids = [WorkerId(node=node, device=device) for node in ("n0", "n1", "n2") for device in range(2)]
    right = {worker_id: {3: 10 + worker_id.device} for worker_id in worker_ids}
    assert say(replica_check, 1, right) == ([], {})
    wrong = right | {worker_ids[2]: {3: 77}}
    assert distrusted(say(replica_check, 2, wrong)) == {worker_ids[2]: frozenset({3})}


def test_copies_are_compared_among_devices_of_one_kind() -> None:
    """Two kinds that round differently agree each; a copy of one kind that differs from its own is wrong."""
    replica_check = ReplicaCheck(device_of=lambda node: "slow" if node in ("n3", "n4") else "fast")
    right = {worker_id: {0: 5 if worker_id.node < "n3" else 6} for worker_id in PLACES}
    assert say(replica_check, 100, right) == ([], {})
    assert distrusted(say(replica_check, 200, right | {PLACES[1]: {0: 6}})) == {PLACES[1]: frozenset({0})}
