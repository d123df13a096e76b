"""Groups that all workers come to without talking."""

from __future__ import annotations

from dataclasses import replace

from oobleck.control.protocol import Status
from oobleck.control.steps.groups import Committee, GroupKey, regrouped, transfer_key, transfer_keys
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


def test_sums_are_kept_where_all_members_have_them_and_formed_again_where_one_has_not():
    layout = plan(("a", "b"), ("c", "d"))
    before = Committee(layout, 2)
    kept, other = before.key_of((A, C)), before.key_of((B, D))
    assert (kept.generation, other.generation) == (2, 2)
    after = Committee(layout, 5, kept=before.keys, regrouped=frozenset({D}))
    assert after.key_of((A, C)) == kept
    assert after.key_of((B, D)) == GroupKey("reduce", 5, (B, D))
    assert after.key_of((A, B)) == GroupKey("reduce", 5, (A, B)), "nobody had this one"
    assert Committee(layout, 7, kept=after.keys).key_of((A, C)) == kept, "it may outlive many plans"


def test_whose_groups_cannot_be_kept():
    clean = Status(
        device=0,
        generation=4,
        applied=1,
        last_record=None,
        reduced=None,
        adopted=3,
        layers=(),
        microbatches_done=0,
        broken=False,
    )
    statuses = {A: clean, B: replace(clean, has_open_groups=True), C: replace(clean, adopted=2)}
    assert regrouped((A, B, C, D), statuses, 3) == (B, C, D)


def test_layers_move_between_two_who_know_of_no_other():
    transfers = tuple(LayerTransfer(layer=layer, source=C, target=target) for layer, target in enumerate((A, B, A)))
    with_a, with_b = transfer_key(transfers[0], 1), transfer_key(transfers[1], 1)
    assert (with_a, with_b) == (GroupKey("transfer", 1, (A, C)), GroupKey("transfer", 1, (B, C)))
    assert transfer_keys(transfers, 1, C) == (with_a, with_b)
    assert transfer_keys(transfers, 1, A) == (with_a,)
    assert transfer_keys(transfers, 1, D) == ()
