"""Which ranks' parts have a parity, and where it lies."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.scripts.parity import groups, place_of, size_of_groups
from oobleck.control.scripts.spread import Parities
from tests.examples import examples

clusters = st.lists(st.integers(1, 3), min_size=2, max_size=12)
"""How many ranks each node has."""


def sources_of(ranks: list[int]) -> dict[int, str]:
    nodes = [f"node{number:02}" for number, count in enumerate(ranks) for _ in range(count)]
    return dict(enumerate(nodes))


@examples(200)
@given(clusters, st.integers(2, 9), st.integers(1, 5))
def test_every_rank_is_in_one_group_and_no_two_are_of_a_node_or_of_a_domain_where_that_can_be(
    ranks: list[int], most: int, num_domains: int
):
    sources = sources_of(ranks)
    nodes = sorted(set(sources.values()))
    domains = {node: str(number % num_domains) for number, node in enumerate(nodes)} if num_domains > 1 else {}
    size, load = size_of_groups(most, nodes, domains), Counter[str]()
    made = list(groups(sources, size, domains))
    assert sorted(rank for group in made for rank in group) == sorted(sources)
    held = Parities()
    for group in made:
        of = [sources[rank] for rank in group]
        assert len(set(of)) == len(group) <= size < len(nodes)
        target = place_of(of, nodes, domains, load)
        assert target is not None
        assert target not in of
        load[target] += 1
        held.add(group, target)
        if len(nodes) % max(1, num_domains) == 0:  # domains of one size
            near = [domains.get(node, node) for node in (*of, target)]
            assert len(set(near)) == len(near)
    holders = {rank: {node} for rank, node in sources.items()}
    assert all(held.covers(rank, holders, ()) for rank in sources)
    for lost in nodes:
        left = {rank: on - {lost} for rank, on in holders.items() if on != {lost}}
        gone = [rank for rank, node in sources.items() if node == lost]
        for rank in gone:
            group, target = held.source_of(rank, left) or ((), "")
            assert rank in group
            assert target != lost


def test_a_parity_beside_a_part_of_its_group_covers_nothing_of_it():
    held = Parities()
    held.add((0, 1), "c")
    holders = {0: {"a"}, 1: {"b"}}
    assert held.covers(0, holders, ())
    assert not held.covers(0, {**holders, 1: {"c"}} | {0: {"c"}}, ())
    assert not held.covers(0, {0: {"a"}, 1: {"a"}}, ()), "both would be lost"
    assert not held.covers(0, holders, {"b"}), "it leaves"
    assert not held.covers(0, holders, {"c"})
    assert held.covers(0, {0: {"a", "d"}, 1: {"a"}}, ()), "there are two copies"
    held.remove((0, 1), "c")
    assert not held.covers(0, holders, ())
    assert held.source_of(0, {1: {"b"}}) is None


def test_parities_are_shared_out_evenly():
    nodes = [f"node{number}" for number in range(9)]
    sources, load = dict(enumerate(nodes)), Counter[str]()
    for group in groups(sources, 2, {}):
        target = place_of([sources[rank] for rank in group], nodes, {}, load)
        assert target is not None
        load[target] += 1
    assert set(load.values()) == {1}
