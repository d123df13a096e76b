"""The tree of commits: everybody is in it once, few hops deep, and a loss changes few edges of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.steps.commit_tree import Neighbours, commit_tree, hops_up, neighbours_in_tree
from oobleck.planner import WorkerId
from tests.examples import examples

FEW = 3
"""Hops up beyond log2 N at most: two between nodes, and one since N counts devices, of which each node has its own."""


def workers(nodes: Iterable[str], devices: int = 1) -> list[WorkerId]:
    return [WorkerId(node=node, device=device) for node in nodes for device in range(devices)]


def named(number: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    style = rng.choice(["node{}", "gpu-{:04}", "10.0.3.{}", "rack1-{}.cluster.example"])
    return [style.format(index + rng.randrange(2) * number) for index in range(number)]


def depths(tree: Mapping[WorkerId, Neighbours]) -> dict[WorkerId, int]:
    (root,) = (worker_id for worker_id, each in tree.items() if each.parent is None)
    found, left = {root: 0}, [root]
    while left:
        above = left.pop()
        for child in tree[above].children:
            assert child not in found
            assert tree[child].parent == above
            found[child] = found[above] + 1
            left.append(child)
    return found


def edges(tree: Mapping[WorkerId, Neighbours]) -> set[tuple[WorkerId, WorkerId]]:
    return {(worker_id, each.parent) for worker_id, each in tree.items() if each.parent is not None}


def most_hops_up(number: int) -> int:
    return math.ceil(math.log2(number)) + FEW


clusters = st.builds(
    lambda number, devices, seed: workers(named(number, seed), devices),
    st.integers(1, 300),
    st.sampled_from([1, 1, 2, 8]),
    st.integers(0, 2**32),
)


@examples(60)
@given(members=clusters)
def test_all_are_in_the_tree_once_within_log_n_hops(members: list[WorkerId]) -> None:
    tree = commit_tree(members)
    found = depths(tree)
    assert set(found) == set(members)
    assert hops_up(members) == max(found.values()) <= most_hops_up(len(members))


@pytest.mark.parametrize(("number", "devices"), [(10_000, 1), (1_250, 8)])
def test_ten_thousand_workers_commit_in_fewer_hops_than_twice_their_logarithm(number: int, devices: int) -> None:
    assert 2 * hops_up(workers(named(number, 0), devices)) < 2 * math.ceil(math.log2(number * devices))


@examples(30)
@given(members=clusters, seed=st.integers(0, 2**32))
def test_each_worker_comes_to_its_own_neighbours(members: list[WorkerId], seed: int) -> None:
    tree = commit_tree(members)
    shuffled = random.Random(seed).sample(members, len(members))
    for worker_id in shuffled[:20]:
        assert neighbours_in_tree(shuffled, worker_id) == tree[worker_id]


@examples(40)
@given(members=clusters)
def test_nobody_has_many_neighbours(members: list[WorkerId]) -> None:
    """Four cells below a node, and two devices within it."""
    assert max(len(each.children) for each in commit_tree(members).values()) <= 4 + 2


def changed_by_losing(nodes: Sequence[str], lost: str, devices: int) -> int:
    before = edges(commit_tree(workers(nodes, devices)))
    after = edges(commit_tree(workers([node for node in nodes if node != lost], devices)))
    return len({edge for edge in before ^ after if lost not in (edge[0].node, edge[1].node)})


@pytest.mark.parametrize("number", [8, 64, 512])
def test_a_loss_changes_as_few_edges_of_the_others_in_a_large_cluster_as_in_a_small_one(number: int) -> None:
    """Edges of the others that come or go; those of the lost node go with it."""
    nodes = named(number, 1)
    tried = random.Random(number).sample(nodes, min(number, 64))
    changed = [changed_by_losing(nodes, lost, 2) for lost in tried]
    assert sum(changed) / len(changed) < 4
    assert max(changed) <= 4 + 2 * 3 * most_hops_up(number)


@examples(25)
@given(number=st.integers(2, 120), seed=st.integers(0, 2**32))
def test_a_node_that_comes_back_finds_its_place_again(number: int, seed: int) -> None:
    """The tree follows from who is there, whatever came before."""
    nodes = named(number, seed)
    assert commit_tree(workers(nodes)) == commit_tree(workers(reversed(nodes)))
