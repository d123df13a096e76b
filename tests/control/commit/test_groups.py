"""Groups that all workers come to without talking."""

from __future__ import annotations

from oobleck.control.commit.groups import Committee, GroupKey, transfer_key, transfer_keys
from oobleck.planner import LayerTransfer, WorkerId
from tests.control.journals import plan

A, B, C, D = (WorkerId(node=node, device=0) for node in "abcd")


def test_who_agrees_on_purpose_generation_and_members_has_the_same_group():
    one, same = GroupKey("reduce", 3, (A, B)), GroupKey("reduce", 3, (A, B))
    assert (one, hash(one), one.name) == (same, hash(same), same.name)
    others = [GroupKey("reduce", 4, (A, B)), GroupKey("stage", 3, (A, B)), GroupKey("reduce", 3, (A, C))]
    assert len({one.name, *(other.name for other in others)}) == len({one, *others}) == 4


def test_a_committee_is_all_of_a_plan_but_those_of_lost_nodes():
    layout = plan(("a", "b"), ("c", "d"))
    assert Committee(layout, 2).key == GroupKey("reduce", 2, (A, B, C, D))
    assert Committee(layout, 3, ("b",)).key == GroupKey("reduce", 3, (A, C, D))


def test_layers_move_between_two_who_know_of_no_other():
    transfers = tuple(LayerTransfer(layer=layer, source=C, target=target) for layer, target in enumerate((A, B, A)))
    with_a, with_b = transfer_key(transfers[0], 1), transfer_key(transfers[1], 1)
    assert (with_a, with_b) == (GroupKey("transfer", 1, (A, C)), GroupKey("transfer", 1, (B, C)))
    assert transfer_keys(transfers, 1, C) == (with_a, with_b)
    assert transfer_keys(transfers, 1, A) == (with_a,)
    assert transfer_keys(transfers, 1, D) == ()
