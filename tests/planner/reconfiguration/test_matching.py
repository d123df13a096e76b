from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner.inventory import Holding, missing_bytes
from oobleck.planner.reconfiguration.matching import Position, match_nodes

LAYER_BYTES = (5, 1, 7, 2)

layer_sets = st.frozensets(st.integers(0, 3))
holdings = st.tuples(layer_sets, layer_sets)


def moved(positions: list[Position], held: dict[str, Holding], nodes: tuple[str, ...]) -> float:
    return sum(
        missing_bytes(position.needed, held[node], LAYER_BYTES) for position, node in zip(positions, nodes, strict=True)
    )


@given(
    needed=st.lists(st.tuples(holdings, st.integers(-1, 1)), max_size=4),
    held=st.lists(st.tuples(holdings, st.integers(0, 2)), min_size=4, max_size=5),
)
def test_no_other_matching_moves_fewer_bytes(
    needed: list[tuple[Holding, int]], held: list[tuple[Holding, int]]
) -> None:
    positions = [Position(needed=holding, origin=origin) for holding, origin in needed]
    nodes = {f"node{index}": holding for index, (holding, _) in enumerate(held)}
    origins = {f"node{index}": origin for index, (_, origin) in enumerate(held) if origin < 2}
    chosen = match_nodes(positions, nodes, origins, LAYER_BYTES)
    assert len(set(chosen)) == len(positions)
    assert moved(positions, nodes, chosen) == min(
        moved(positions, nodes, other) for other in itertools.permutations(nodes, len(positions))
    )


def test_equal_nodes_stay_in_their_pipelines() -> None:
    front, back = frozenset({0, 1}), frozenset({2, 3})
    positions = [Position(needed=(layers,), origin=origin) for origin in (0, 1) for layers in (front, back)]
    nodes = {"b1": (back,), "a1": (back,), "b0": (front,), "a0": (front,)}
    assert match_nodes(positions, nodes, {"a0": 0, "a1": 0, "b0": 1, "b1": 1}, LAYER_BYTES) == ("a0", "a1", "b0", "b1")


def test_nodes_that_cost_the_same_stay_in_their_pipelines() -> None:
    positions = [Position(needed=(frozenset({layer}),), origin=origin) for origin, layer in ((0, 1), (1, 2))]
    nodes: dict[str, Holding] = {"b": (frozenset({0}),), "a": (frozenset({0}),)}
    assert match_nodes(positions, nodes, {"a": 0, "b": 1}, LAYER_BYTES) == ("a", "b")


def test_a_node_of_fewer_devices_lacks_the_rest() -> None:
    assert missing_bytes((frozenset({0}), frozenset({2})), (frozenset({0}),), LAYER_BYTES) == 7


def test_nodes_may_be_matched_so_that_the_busiest_link_is_done_first() -> None:
    """A node that joins takes over a smaller stage, whose node goes on to a larger one."""
    small, large = frozenset({0, 1, 2}), frozenset({2, 3, 4, 5})
    positions = [Position(needed=(layers,), origin=-1) for layers in (small, large)]
    nodes: dict[str, Holding] = {"old": (small,), "joined": (frozenset(),)}
    assert match_nodes(positions, nodes, {}, (10,) * 6) == ("old", "joined")
    assert match_nodes(positions, nodes, {}, (10,) * 6, evenly=True) == ("joined", "old")
