"""An image of what a journal comes to stands for the entries before it, wherever it was made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import JournalEntry, PlanAdopted
from oobleck.control.replay import BooksImage, RunBooks
from oobleck.sim.cluster.run import run_cluster
from oobleck.sim.trace import Joined, Lost, MasterCrashed, Slowed, Trace, WorkerCrashed
from oobleck.wire import decode_json, encode_json
from tests.control.journals import adopted, books_of, committed, job_started, plan, recovered, run_with_a_loss
from tests.examples import examples
from tests.sim.strategies import traces
from tests.sim.virtual import STARTED_S, Setting


def again(books: RunBooks) -> RunBooks:
    """The books of their image, as it comes back from a disk."""
    image = books.image()
    return books if image is None else RunBooks.of_image(decode_json(BooksImage, encode_json(image)))


def shown(books: RunBooks, now_s: float) -> Sequence[object]:
    """All that a master, and those who look at it, see in the books."""
    replayed = books.finish()
    ordered = {} if replayed is None else replayed.generations.ordered
    found = () if replayed is None else (
        replayed.members, ordered, [each.id for each in ordered.values()],
        replayed.generations.current, replayed.is_settled, replayed.records, replayed.saved, replayed.interrupted,
        replayed.shards, replayed.began, replayed.restored,
    )  # fmt: skip
    return (*found, books.account.summary(), books.view.at(now_s), books.metrics.sample(now_s), books.finished)


def check(entries: Sequence[JournalEntry], place: int) -> None:
    """Make an image after so many entries, and read the others."""
    first = again(books_of(entries[:place]))
    assert first.image() == books_of(entries[:place]).image(), "an image comes to itself"
    for entry in entries[place:]:
        first.apply(entry)
    whole, now_s = books_of(entries), entries[-1].t_s + 1
    assert first.image() == whole.image()
    assert shown(first, now_s) == shown(whole, now_s)


@pytest.mark.parametrize("place", range(0, 150, 7))
def test_a_journal_is_the_same_from_an_image_made_anywhere(place: int):
    check(tuple(run_with_a_loss(ends=place % 2 == 0)), place)


@examples(20)
@given(
    trace=traces(
        min_nodes=2,
        max_nodes=5,
        duration_s=1e6,
        kinds=(Lost, Joined, WorkerCrashed, MasterCrashed, Slowed),
        times=st.lists(st.floats(STARTED_S, 30.0), max_size=5).map(sorted),
        all_start=True,
    ),
    shape=st.sampled_from([Setting(slowness=5.0), Setting(slowness=5.0, reductions=4, layers_per_device=2)]),
    share=st.floats(0, 1),
)
def test_a_generated_run_is_the_same_from_an_image_made_anywhere(trace: Trace, shape: Setting, share: float):
    trace = replace(trace, duration_s=45.0, source="")
    entries = run_cluster(trace, job=shape.job, profile=shape.profile, seed=0).entries
    check(entries, round(share * len(entries)))


def test_books_of_a_long_run_keep_no_more_than_those_of_a_short_one():
    """Steps, plans, checkpoints: an image of thousands is as long as one of tens, but for what was counted."""

    def image(steps: int) -> str:
        names = [f"node{index}" for index in range(4)]
        rows = (tuple(names[:2]), tuple(names[2:]))
        entries: list[JournalEntry] = [job_started(tuple(names), max_steps=10**6)]
        generation = 0
        for step in range(1, steps + 1):
            if step % 20 == 1:
                generation += 1
                entries.append(adopted(float(step), generation, plan(*rows), oldest=max(0, generation - 1)))
            entries.append(committed(float(step), step, generation))
        found = books_of(entries).image()
        assert found is not None
        written = json.loads(encode_json(found))
        written["books"]["view"]["_events"] = []
        written["books"]["view"]["_curve"] = {}  # it has a limit of its own
        return json.dumps(written)

    assert len(image(4000)) < len(image(100)) + 200


def test_only_plans_that_may_be_in_force_or_that_are_gone_back_to_are_kept():
    rows = (("a",), ("b",))
    entries = [
        job_started(("a", "b")),
        adopted(1.0, 1, plan(*rows)),
        adopted(2.0, 2, plan(*rows), oldest=1),
        adopted(3.0, 3, plan(*rows), oldest=2, restored="step-4", restored_step=4),
        adopted(4.0, 4, plan(*rows), oldest=3, finish=7, finished_under=3),
        adopted(5.0, 5, plan(*rows), oldest=4, finish=8, finished_under=4),
        recovered(6.0, 5),
        adopted(7.0, 6, plan(*rows), oldest=5, finish=9, finished_under=5),
    ]
    image = books_of(entries).image()
    assert image is not None
    kept = [line.generation for line in image.plans if isinstance(line, PlanAdopted)]
    assert kept == [1, 3, 4, 5, 6]  # the first, what was gone back to, and what a worker may have; 4 has all segments
