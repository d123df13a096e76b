"""The dealer alone: which records it hands out, what it asks for, and going back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.data.record_assigner import RecordAssigner, Taken
from oobleck.control.protocol import (
    DataPosition,
    OpenShard,
    RecordRun,
    ScanRange,
    ScanResult,
    digest_of_shards,
    visit_at,
)
from oobleck.control.protocol.data_position import merged
from tests.examples import examples


def assigner(
    num_shards: int, *, batch: int = 4, chunk: int = 2, at_once: int = 1, epochs: int = 1, follows: bool = False
):
    return RecordAssigner(
        num_shards,
        seed=3,
        batch=batch,
        chunk=chunk,
        at_once=at_once,
        epochs=epochs,
        follows=follows,
        items_per_record=7,
    )


def answer(want: ScanRange, lengths: list[int], *, is_complete: bool = True) -> ScanResult:
    stop = min(want.start + want.limit, lengths[want.shard])
    return ScanResult(
        shard=want.shard,
        bounds=tuple(range(want.start, stop + 1)),
        items=(),
        is_end=is_complete and stop == lengths[want.shard],
    )


def tell(subject: RecordAssigner, lengths: list[int], count: int = 100) -> None:
    """Answer all that it asks until it knows enough, or there is no more."""
    for _ in range(200):
        wants = subject.wants(count)
        if not wants:
            return
        for want in wants:
            assert subject.found(answer(want, lengths))
    raise AssertionError("it asks for ever")


def take_all(subject: RecordAssigner, lengths: list[int]) -> list[Taken]:
    taken = []
    while not subject.is_over:
        tell(subject, lengths)
        one = subject.take()
        if one is not None:
            taken.append(one)
    return taken


def records(steps: list[Taken]) -> list[tuple[int, int]]:
    return [(run.shard, at) for step in steps for run in step.runs for at in run.bounds[:-1]]


@examples(200)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    at_once=st.integers(1, 4),
    epochs=st.integers(1, 3),
    batch=st.integers(1, 7),
    chunk=st.integers(1, 4),
    follows=st.booleans(),
)
def test_each_record_is_taken_once_an_epoch(lengths, at_once, epochs, batch, chunk, follows):
    subject = assigner(len(lengths), batch=batch, chunk=chunk, at_once=at_once, epochs=epochs, follows=follows)
    steps = take_all(subject, lengths)
    everything = [(shard, at) for shard, length in enumerate(lengths) for at in range(length)]
    assert Counter(records(steps)) == Counter(everything * epochs)
    sizes = [sum(run.num_records for run in step.runs) for step in steps]
    assert all(size == batch for size in sizes[:-1])
    assert [step.after.records for step in steps] == [sum(sizes[: at + 1]) for at in range(len(sizes))]
    assert [step.num_items for step in steps] == [7 * size for size in sizes]


@examples(200)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    at_once=st.integers(1, 4),
    back_to=st.integers(0, 20),
    again=st.integers(1, 3),
)
def test_going_back_takes_the_same_records_again(lengths, at_once, back_to, again):
    subject = assigner(len(lengths), at_once=at_once, epochs=2)
    steps = take_all(subject, lengths)
    position = steps[min(back_to, len(steps)) - 1].after if back_to and steps else DataPosition()
    for _ in range(again):
        other = assigner(len(lengths), at_once=at_once, epochs=2)  # it knows nothing but the position
        other.go_back(position)
        assert take_all(other, lengths) == steps[min(back_to, len(steps)) :]


def test_shards_that_do_not_grow_are_waited_for_in_their_turn():
    subject = assigner(2, at_once=2)
    first, second = (want.shard for want in subject.wants(8))
    assert subject.found(ScanResult(shard=second, bounds=tuple(range(9)), items=(), is_end=False))
    assert subject.take() is None, "it is the first one's turn"
    assert subject.found(ScanResult(shard=first, bounds=(0, 1, 2), items=(), is_end=False))
    taken = subject.take()
    assert taken is not None
    assert taken.runs == (RecordRun(shard=first, bounds=(0, 1, 2)), RecordRun(shard=second, bounds=(0, 1, 2)))


def test_shards_that_grow_are_passed_by_while_they_have_nothing():
    subject = assigner(2, at_once=2, follows=True)
    _, second = (want.shard for want in subject.wants(8))
    assert subject.found(ScanResult(shard=second, bounds=tuple(range(5)), items=(), is_end=False))
    taken = subject.take()
    assert taken is not None
    assert taken.runs == (RecordRun(shard=second, bounds=(0, 1, 2, 3, 4)),)
    assert not taken.is_last


def test_positions_need_not_be_records_numbers():
    subject = assigner(1, batch=2)
    subject.wants(2)
    assert subject.found(ScanResult(shard=0, bounds=(0, 70, 75, 300), items=(3, 1, 9), is_end=True))
    taken = subject.take()
    assert taken is not None
    assert taken.runs == (RecordRun(shard=0, bounds=(0, 70, 75)),)
    assert taken.num_items == 4
    assert taken.after.open == (OpenShard(visit=0, next=75, records=2),)
    last = subject.take()
    assert last is not None
    assert (last.runs, last.is_last) == ((RecordRun(shard=0, bounds=(75, 300)),), True)


def test_an_answer_that_does_not_continue_what_is_known_is_not_taken_in():
    subject = assigner(1)
    subject.wants(4)
    assert subject.found(ScanResult(shard=0, bounds=(0, 1, 2), items=(), is_end=False))
    assert not subject.found(ScanResult(shard=0, bounds=(0, 1, 2), items=(), is_end=False))
    assert not subject.found(ScanResult(shard=0, bounds=(5, 6), items=(), is_end=False))
    assert [want.start for want in subject.wants(4)] == [2]


def test_a_shard_in_quarantine_is_left_and_another_try_goes_on_there():
    lengths = [6, 6]
    subject = assigner(2)
    tell(subject, lengths)
    first = subject.take()
    assert first is not None
    shard = first.runs[0].shard
    subject.go_back(first.after)
    subject.bar(shard, "broken")
    rest = take_all(subject, lengths)
    assert [left.next for left in rest[-1].after.left] == [4]
    again = assigner(2)
    again.go_back(rest[-1].after.with_another_try())
    more = take_all(again, lengths)
    assert Counter(records([first, *rest, *more])) == Counter((shard, at) for shard in (0, 1) for at in range(6))


def test_a_long_problem_is_cut_before_it_is_stored_with_every_state():
    subject = assigner(2)
    subject.bar(0, "x" * 10_000)
    (*_, last) = take_all(subject, [6, 6])
    assert [len(left.problem) for left in last.after.left] == [120]


def test_each_epoch_has_an_order_of_its_own():
    visits = [visit_at(at, 8, seed=1) for at in range(24)]
    assert sorted(visits) == list(range(24))
    orders = [tuple(visit % 8 for visit in visits[first : first + 8]) for first in (0, 8, 16)]
    assert len({*orders, tuple(range(8))}) == 4


def test_done_visits_are_told_as_merged_intervals():
    assert merged([(5, 6), (1, 2), (2, 4), (3, 5), (8, 9)]) == ((1, 6), (8, 9))
    subject = assigner(3)
    steps = take_all(subject, [4, 4, 4])
    assert steps[-1].after.done(3, seed=3) == ((0, 3),)
    open_visit = steps[1].after.open or steps[0].after.open
    assert sum(stop - first for first, stop in steps[0].after.done(3, seed=3)) + len(steps[0].after.open) == (
        steps[0].after.opened
    ), open_visit


def test_names_and_their_order_tell_shards_apart():
    assert digest_of_shards(["a", "b"]) != digest_of_shards(["b", "a"])
