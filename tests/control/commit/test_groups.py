"""Groups that all workers come to without talking."""

from __future__ import annotations

from oobleck.control.commit.groups import Committee, GroupKey, transfer_key
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
    assert Committee(layout, 2).members == (A, B, C, D)
    assert Committee(layout, 3, ("b",)).members == (A, C, D)


def test_layers_move_among_those_who_send_or_receive():
    assert transfer_key((), 1) is None
    transfers = (LayerTransfer(layer=0, source=C, target=A), LayerTransfer(layer=1, source=C, target=B))
    assert transfer_key(transfers, 1) == GroupKey("transfer", 1, (A, B, C))
