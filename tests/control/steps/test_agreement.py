"""What all agree on: one total of all parts, the same bits for everybody, in whatever order messages arrive."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.protocol import CommitMessage, PartUp, Subject, Tally, Topic, TotalDown, Totals
from oobleck.control.steps.agreement import Agreements, Letter
from oobleck.control.steps.commit_tree import commit_tree
from oobleck.control.steps.groups import Committee
from oobleck.planner import ExecutionPlan, WorkerId
from oobleck.wire import FrameDecoder, encode_frame
from tests.control.journals import plan
from tests.examples import examples

STEP = Subject(Topic.STEP, 7)


def layout(number: int) -> ExecutionPlan:
    return plan(*((f"n{index}",) for index in range(number)))


def part_of(index: int) -> Totals:
    return Totals((0.1 * index + 1e-17, float(index == 3)), Tally.of((index,)))


class Peers:
    """Workers and the messages between them, which arrive by chance, each pair's in their order."""

    def __init__(self, committee: Committee, rng: random.Random) -> None:
        self.committee = committee
        self.members = committee.members
        self.rng = rng
        self.agreements = {member: Agreements(member, lock=nullcontext()) for member in self.members}
        self.letters: dict[tuple[WorkerId, WorkerId], deque[CommitMessage]] = {}
        self.sent: list[tuple[WorkerId, Letter]] = []

    def post(self, worker_id: WorkerId, subject: Subject = STEP) -> None:
        part = part_of(self.members.index(worker_id))
        self.note(worker_id, self.agreements[worker_id].post(self.committee, subject, part))

    def note(self, source: WorkerId, letters: Iterable[Letter]) -> None:
        for letter in letters:
            self.sent.append((source, letter))
            self.letters.setdefault((source, letter.target), deque()).append(letter.message)

    def carry(self) -> bool:
        if not self.letters:
            return False
        source, target = pair = self.rng.choice(list(self.letters))
        message = self.letters[pair].popleft()
        if not self.letters[pair]:
            del self.letters[pair]
        self.note(target, self.agreements[target].receive(source, message))
        return True

    def total(self, worker_id: WorkerId) -> Totals | None:
        return self.agreements[worker_id].take(self.committee, STEP)


def peers_of(number: int, seed: int = 0, generation: int = 1) -> Peers:
    return Peers(Committee(layout(number), generation), random.Random(seed))


@examples(60)
@given(number=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_all_have_one_total_of_all_parts_and_nobody_before_all_have_brought_theirs(number: int, seed: int) -> None:
    peers = peers_of(number, seed)
    to_post = list(peers.members)
    peers.rng.shuffle(to_post)
    while to_post or peers.letters:
        if to_post and peers.rng.random() < 0.5:
            peers.post(to_post.pop())
        else:
            peers.carry()
        if to_post:
            assert not any(each.is_here(peers.committee, STEP) for each in peers.agreements.values())
    totals = [peers.total(member) for member in peers.members]
    assert all(total is not None and total == totals[0] for total in totals), "the same bits for all"
    assert totals[0] is not None
    assert totals[0].counted == Tally.of(range(number))
    assert math.isclose(totals[0].numbers[0], 0.1 * sum(range(number)), abs_tol=1e-12)
    assert totals[0].numbers[1] == (number > 3)
    assert len(peers.sent) == 2 * (number - 1)
    assert all(peers.total(member) is None for member in peers.members), "it is taken once"


def test_the_order_in_which_messages_arrive_changes_no_bit() -> None:
    found = set()
    for seed in range(20):
        peers = peers_of(17, seed)
        for member in peers.members:
            peers.post(member)
        while peers.carry():
            pass
        found.add(peers.total(peers.members[0]))
    assert len(found) == 1


def test_a_worker_waits_for_its_children_and_then_for_its_parent() -> None:
    peers = peers_of(20)
    tree = commit_tree(peers.members)
    inner = next(member for member, each in tree.items() if each.parent is not None and each.children)
    own, parent = peers.agreements[inner], tree[inner].parent
    assert own.awaited(peers.committee, STEP) == ()
    peers.post(inner)
    assert own.awaited(peers.committee, STEP) == tree[inner].children
    for child in tree[inner].children:
        own.receive(child, PartUp(generation=1, subject=STEP, part=part_of(0)))
    assert own.awaited(peers.committee, STEP) == (parent,)
    assert parent is not None
    own.receive(parent, TotalDown(generation=1, subject=STEP, total=part_of(0)))
    assert own.awaited(peers.committee, STEP) == ()


def test_parts_may_come_before_a_worker_knows_of_their_generation() -> None:
    peers = peers_of(9, generation=5)
    (root,) = (member for member, each in commit_tree(peers.members).items() if each.parent is None)
    for member in peers.members:
        if member != root:
            peers.post(member)
    while peers.carry():
        pass
    peers.post(root)
    assert peers.agreements[root].is_here(peers.committee, STEP)


def test_messages_of_an_older_generation_are_dropped() -> None:
    """A total that was on its way when a fence came would commit what is agreed on again in a newer generation."""
    old, new = Committee(layout(2), 1), Committee(layout(2), 2)
    tree = commit_tree(old.members)
    leaf = next(member for member, each in tree.items() if each.parent is not None)
    parent = tree[leaf].parent
    assert parent is not None
    agreements = Agreements(leaf, lock=nullcontext())
    agreements.post(old, STEP, part_of(0))
    agreements.post(new, STEP, part_of(0))
    assert agreements.receive(parent, TotalDown(generation=1, subject=STEP, total=part_of(1))) == ()
    assert not agreements.is_here(new, STEP)
    agreements.receive(parent, TotalDown(generation=2, subject=STEP, total=part_of(1)))
    assert agreements.is_here(new, STEP)
    assert not agreements.is_here(old, STEP)


def test_a_total_for_the_process_before_is_dropped() -> None:
    peers = peers_of(2)
    tree = commit_tree(peers.members)
    leaf = next(member for member, each in tree.items() if each.parent is not None)
    parent = tree[leaf].parent
    assert parent is not None
    assert peers.agreements[leaf].receive(parent, TotalDown(generation=1, subject=STEP, total=part_of(1))) == ()
    assert not peers.agreements[leaf].is_here(peers.committee, STEP)


def test_subjects_do_not_mix() -> None:
    peers = peers_of(1)
    peers.post(peers.members[0])
    peers.post(peers.members[0], Subject(Topic.SECTION, 7, 1))
    agreements = peers.agreements[peers.members[0]]
    assert agreements.is_here(peers.committee, STEP)
    assert not agreements.is_here(peers.committee, Subject(Topic.EVALUATION, 7))
    with pytest.raises(AssertionError, match="twice"):
        peers.post(peers.members[0], STEP)


@examples(60)
@given(
    counted=st.lists(st.integers(0, 200), min_size=1, max_size=60),
    other=st.lists(st.integers(0, 200), min_size=1, max_size=60),
)
def test_a_tally_tells_what_was_counted(counted: Sequence[int], other: Sequence[int]) -> None:
    assert (Tally.of(counted) == Tally.of(other)) == (sorted(counted) == sorted(other))
    both = Tally.of((*counted, *other))
    assert Tally.of(counted) + Tally.of(other) == both
    assert both - Tally.of(other) == Tally.of(counted)


@pytest.mark.parametrize("number", [0.1 + 1e-17, math.inf, -math.inf, math.nan])
def test_what_overflows_is_agreed_on_as_well(number: float) -> None:
    sent = TotalDown(generation=1, subject=STEP, total=Totals((number,), Tally.of(range(100))))
    (received,) = FrameDecoder(TotalDown).feed(encode_frame(sent))
    assert repr(received) == repr(sent)
