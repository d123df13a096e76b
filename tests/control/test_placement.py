"""Where copies lie: apart, evenly, and where they were before."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.scripts.placement import place
from tests.examples import examples

copies = st.integers(1, 3)


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, str]:
    """Nodes, each with its domain."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    return {f"node{rack}-{number}": f"rack{rack}" for rack, size in enumerate(sizes) for number in range(size)}


@examples(200)
@given(clusters(), copies)
def test_each_node_has_its_copies_on_other_nodes_and_none_holds_far_more_than_others(
    domains: dict[str, str], num_copies: int
) -> None:
    placed = place(list(domains), num_copies, domains=domains, before={})
    assert placed.keys() == domains.keys()
    for node, targets in placed.items():
        assert len(set(targets)) == len(targets) == min(num_copies, len(domains) - 1)
        assert node not in targets
    held = Counter(target for targets in placed.values() for target in targets)
    # A small domain may have to take what the nodes of a large one may not keep among themselves.
    sizes = Counter(domains.values())
    evenly = max(num_copies, *((len(domains) - size) / size for size in sizes.values()))
    assert max(held.values(), default=0) <= evenly + 1


@examples(200)
@given(st.integers(1, 5), st.integers(1, 4), copies)
def test_no_two_copies_are_in_one_domain_where_there_are_enough(size: int, more: int, num_copies: int) -> None:
    domains = {f"{rack}-{each}": str(rack) for rack in range(num_copies + more) for each in range(size)}
    for node, targets in place(list(domains), num_copies, domains=domains, before={}).items():
        assert len({domains[each] for each in (node, *targets)}) == num_copies + 1


@examples(200)
@given(clusters(), copies, st.randoms(use_true_random=False))
def test_a_lost_node_moves_only_the_copies_that_it_held(domains: dict[str, str], num_copies: int, random) -> None:
    before = place(list(domains), num_copies, domains=domains, before={})
    lost = random.choice(sorted(domains))
    left = [node for node in domains if node != lost]
    after = place(left, num_copies, domains=domains, before=before)
    for node in left:
        kept = [target for target in before[node] if target != lost]
        assert list(after[node])[: len(kept)] == kept[: len(after[node])]


def test_pairs_and_not_a_ring_hold_each_others_copies() -> None:
    nodes = [f"node{number}" for number in range(8)]
    placed = place(nodes, 1, domains={}, before={})
    assert all(placed[placed[node][0]] == (node,) for node in nodes)
