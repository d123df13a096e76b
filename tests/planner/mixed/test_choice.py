from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.planner.costs import Timing
from oobleck.planner.instantiation import distribute_microbatches
from oobleck.planner.mixed import Chooser
from tests.examples import examples

Counts = tuple[int, ...]


@st.composite
def timings(draw: st.DrawFn, nodes: Counts) -> dict[Counts, Timing]:
    """Pipelines of some numbers of nodes, whose first microbatch takes at least as long as the next."""
    possible = [(a, b) for a in range(nodes[0] + 1) for b in range(nodes[1] + 1) if a or b]
    chosen = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=6, unique=True))
    found = {}
    for counts in sorted(chosen):
        next_s = draw(st.floats(0.1, 5.0))
        found[counts] = Timing(first_s=next_s * draw(st.floats(1.0, 6.0)), next_s=next_s)
    return found


def multisets(items: Sequence[Counts], nodes: Counts) -> Iterator[tuple[Counts, ...]]:
    yield ()
    for index, item in enumerate(items):
        rest = tuple(have - used for have, used in zip(nodes, item, strict=True))
        if min(rest) >= 0:
            for others in multisets(items[index:], rest):
                yield (item, *others)


def slowest_s(known: dict[Counts, Timing], pipelines: Sequence[Counts], total: int) -> float:
    own = [known[counts] for counts in pipelines]
    counts = distribute_microbatches(own, total)
    return max(timing.step_s(count) for timing, count in zip(own, counts, strict=True))


@examples(150)
@given(data=st.data(), total=st.sampled_from((2, 5, 17)), fewest=st.integers(1, 3), exactly=st.booleans())
def test_no_other_pipelines_are_faster(data: st.DataObject, total: int, fewest: int, exactly: bool) -> None:
    nodes = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 3)), label="nodes")
    assume(any(nodes) and fewest <= total)
    known = data.draw(timings(nodes), label="timings")
    chosen = Chooser(known, total).choose(nodes, fewest=fewest, exactly=exactly)
    others = [each for each in multisets(sorted(known), nodes) if 0 < len(each) <= total]
    assert Chooser(known, total).most_pipelines(nodes) == max(map(len, others))
    allowed = [each for each in others if (len(each) == fewest if exactly else len(each) >= fewest)]
    assert (chosen is None) == (not allowed)
    if chosen is not None:
        assert chosen.pipelines in [
            tuple(sorted(each, key=chosen.pipelines.index)) for each in allowed if set(each) <= set(chosen.pipelines)
        ]
        assert sum(chosen.num_microbatches) == total
        best_s = min(slowest_s(known, each, total) for each in allowed)
        assert chosen.slowest_s == pytest.approx(best_s, rel=1e-9)


@examples(60)
@given(data=st.data(), total=st.sampled_from((5, 17)), fewest=st.integers(1, 3))
def test_very_many_nodes_are_kept_apart_by_kind_and_chosen_as_well(
    data: st.DataObject, total: int, fewest: int
) -> None:
    nodes = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3)), label="nodes")
    known = data.draw(timings(nodes), label="timings")
    alone = {counts: timing for counts, timing in known.items() if 0 in counts}
    assume(alone)
    together = Chooser(alone, total).choose(nodes, fewest=fewest)
    many = Chooser(known, total, most_states=0)
    apart = many.choose(nodes, fewest=fewest)
    assert many.cheapest(nodes, (1.0, 1.0), fewest=1) is None
    assert (together is None) == (apart is None)
    if together is not None and apart is not None:
        assert apart.slowest_s == pytest.approx(together.slowest_s, rel=1e-9)


def test_the_cheapest_nodes_are_those_that_train_most_for_their_price() -> None:
    # A node of the second kind is half as fast: worth it for less than half the price.
    known = {(1, 0): Timing(first_s=1.0, next_s=1.0), (0, 1): Timing(first_s=2.0, next_s=2.0)}
    chooser = Chooser(known, 24)
    assert chooser.cheapest((2, 2), (1.0, 0.9), fewest=1) == (2, 0)
    assert chooser.cheapest((2, 2), (1.0, 0.1), fewest=1) in {(0, 1), (0, 2)}
    assert chooser.cheapest((2, 2), (1.0, 0.1), fewest=3) in {(1, 2), (2, 1)}
    assert Chooser(known, 24).cheapest((0, 0), (1.0, 1.0), fewest=1) is None
