"""Reports that are gathered in values, each of which shares what it has with the next."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.recovery.gathered import Gathered

BATCHES = st.lists(st.integers(0, 12), max_size=4)
ADDITIONS = st.lists(st.tuples(st.integers(0, 30), BATCHES, st.integers(0, 9)), max_size=30)
"""Which of those made so far is added to (often the newest), for which keys, and what."""


@given(ADDITIONS, st.data())
def test_each_is_what_a_copied_dict_would_be_whatever_is_made_from_it(
    additions: list[tuple[int, list[int], int]], data: st.DataObject
) -> None:
    made: list[tuple[Gathered[int, int], dict[int, int]]] = [(Gathered(), {})]
    for back, keys, value in additions:
        gathered, plain = made[-1 - back if back < len(made) else -1]
        made.append((gathered.adding(keys, value), {**plain, **dict.fromkeys(keys, value)}))
    for index in data.draw(st.permutations(range(len(made)))):
        gathered, plain = made[index]
        key = data.draw(st.integers(0, 12))
        assert (key in gathered, gathered.get(key), len(gathered)) == (key in plain, plain.get(key), len(plain))
        assert list(gathered.items()) == list(plain.items())
        assert gathered == plain == gathered.copied()
        some = sorted({*data.draw(BATCHES)})
        assert gathered.has_all(some) == (plain.keys() >= {*some})
    for gathered, plain in made:
        assert list(gathered.items()) == list(plain.items()), "though others were looked at since"


def test_it_begins_with_a_copy_of_what_it_is_given() -> None:
    known = {1: "a"}
    gathered = Gathered(known)
    gathered.adding((2,), "b")
    assert known == {1: "a"}
    gathered.copied()[4] = "d"
    known[3] = "c"
    assert gathered == {1: "a"}


def test_adding_to_the_newest_copies_nothing() -> None:
    """Else 10,000 answers cost the master 10,000 copies of up to 10,000 answers."""
    number = 500
    tracemalloc.start()
    try:
        made: list[Gathered[int, str]] = [Gathered()]
        for key in range(number):
            made.append(made[-1].adding((key,), "said"))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < number * 1000, "copies would have a hundred times as much"
    assert [len(each) for each in made] == list(range(number + 1))
