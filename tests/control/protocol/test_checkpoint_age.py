"""Which of several saved states is the newest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.protocol import StateAge, ages, checkpoint_name

DAYS = st.integers(1, 28).map(lambda day: f"2026-01-{day:02d}")


def state(run: str, generation: int, step: int, saved_at: str, origin: str | None = None) -> StateAge:
    return StateAge(name=checkpoint_name(run, step=step, generation=generation), saved_at=saved_at, origin=origin)


@given(
    places=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 50)), min_size=1, unique=True),
    data=st.data(),
)
def test_no_clock_changes_the_order_within_a_run(places: list[tuple[int, int]], data: st.DataObject) -> None:
    states = [state("a", generation, step, data.draw(DAYS)) for generation, step in places]
    age = ages(states)
    assert sorted(age, key=age.__getitem__) == [
        checkpoint_name("a", step=step, generation=generation) for generation, step in sorted(places)
    ]


@given(first=DAYS, second=DAYS, third=DAYS)
def test_no_clock_makes_a_run_older_than_what_it_continues(first: str, second: str, third: str) -> None:
    one = state("a", 1, 30, first)
    two = state("b", 1, 10, second, origin=one.name)
    three = state("c", 1, 5, third, origin=two.name)
    assert list(ages([three, one, two])) == [one.name, two.name, three.name]


def test_runs_without_a_connection_are_ordered_by_their_clocks() -> None:
    other, own = state("a", 7, 90, "2026-01-02"), state("b", 1, 3, "2026-01-05")
    assert list(ages([own, other])) == [other.name, own.name]


def test_runs_that_claim_to_continue_each_other_are_ordered_all_the_same() -> None:
    one = state("a", 1, 1, "2026-01-02", origin=checkpoint_name("b", step=1, generation=1))
    two = state("b", 1, 1, "2026-01-01", origin=one.name)
    assert set(ages([one, two])) == {one.name, two.name}
