from __future__ import annotations

from collections import Counter

import pytest

from oobleck.errors import Unrecoverable
from oobleck.planner import WorkerId
from oobleck.planner.inventory import Holding, Inventory, plan_transfers

ALL = frozenset({0, 1})
NONE: frozenset[int] = frozenset()


def test_a_layer_is_read_in_equal_parts_from_all_its_holders() -> None:
    inventory = Inventory({"a": (ALL,), "b": (NONE,), "c": (frozenset({1}),)}, 2)
    transfers = plan_transfers([("b", (ALL,))], inventory, max_sources=16)
    assert [(t.layer, t.source.node, t.target, t.part, t.num_parts) for t in transfers] == [
        (0, "a", WorkerId(node="b", device=0), 0, 1),
        (1, "a", WorkerId(node="b", device=0), 0, 2),
        (1, "c", WorkerId(node="b", device=0), 1, 2),
    ]


def test_more_holders_than_a_reader_takes_are_shared_out_in_turn() -> None:
    holdings: dict[str, Holding] = {f"h{index}": (frozenset({0}),) for index in range(8)}
    holdings |= {f"t{index}": (NONE,) for index in range(6)}
    inventory = Inventory(holdings, 1)
    for num_targets, num_parts, most_sent in ((1, 4, 1), (2, 4, 1), (4, 2, 1), (6, 1, 1)):
        arrivals = [(f"t{index}", (frozenset({0}),)) for index in range(num_targets)]
        transfers = plan_transfers(arrivals, inventory, max_sources=4)
        assert {t.num_parts for t in transfers} == {num_parts}
        assert max(Counter(t.source for t in transfers).values()) == most_sent
        for target in {t.target for t in transfers}:
            assert sorted(t.part for t in transfers if t.target == target) == list(range(num_parts))


def test_several_devices_of_a_node_each_get_what_they_lack() -> None:
    inventory = Inventory({"a": (frozenset({0}), frozenset({1})), "b": (frozenset({1}),)}, 2)
    transfers = plan_transfers(
        [
            ("b", (frozenset({1}), frozenset({0}))),
        ],
        inventory,
        max_sources=1,
    )
    assert [(t.layer, t.source, t.target) for t in transfers] == [
        (0, WorkerId(node="a", device=0), WorkerId(node="b", device=1))
    ]


def test_layers_that_nobody_holds_are_named() -> None:
    inventory = Inventory({"a": (frozenset({1}),), "b": (NONE,)}, 4)
    with pytest.raises(Unrecoverable, match="layers 0, 2, 3") as caught:
        inventory.check_complete()
    assert caught.value.layers == (0, 2, 3)
