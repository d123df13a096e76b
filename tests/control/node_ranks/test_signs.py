"""Whether ranks of a node give signs of life."""

from __future__ import annotations

from oobleck.control.node_ranks import NodeSigns
from oobleck.control.protocol import RanksQuiet


def quiet(*idle: int, has_shown: bool = True, is_quiet: bool = True) -> RanksQuiet:
    return RanksQuiet(generation=1, is_quiet=is_quiet, has_shown=has_shown, idle=idle)


def test_a_node_says_once_that_its_ranks_are_quiet_and_once_that_they_are_not() -> None:
    signs = NodeSigns(timeout_s=10, generation=1)
    assert signs.look(0, count=5, used_s={0: 1.0, 1: 1.0}) == quiet(is_quiet=False)
    assert signs.look(9, count=5, used_s={0: 1.1, 1: 9.0}) is None
    assert signs.look(10, count=5, used_s={0: 1.1, 1: 10.0}) == quiet(0), "rank 1 computes"
    assert signs.look(11, count=5, used_s={0: 1.1, 1: 11.0}) is None
    assert signs.look(12, count=6, used_s={0: 1.1, 1: 12.0}) == quiet(is_quiet=False)
    assert signs.look(21.9, count=6, used_s={0: 1.1, 1: 12.0}) is None, "time counts from the last sign"


def test_it_is_said_of_ranks_that_they_have_never_shown_a_sign() -> None:
    signs = NodeSigns(timeout_s=10, generation=1)
    signs.look(0, count=0, used_s={0: 1.0})
    assert signs.look(10, count=0, used_s={0: 1.0}) == quiet(0, has_shown=False)
