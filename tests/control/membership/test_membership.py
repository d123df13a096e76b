"""Which states a node may go through, and who counts as what."""

from __future__ import annotations

import pytest

from oobleck.control.journal import WorkerUp
from oobleck.control.membership.membership import Membership, MemberState
from oobleck.errors import PeerError, UsageError
from oobleck.job import NodeSpec
from oobleck.planner import WorkerId

A, B, C = (
    NodeSpec(name="a", host="one", devices=(0, 1)),
    NodeSpec(name="b", host="one"),
    NodeSpec(name="c", host="two"),
)


@pytest.fixture
def members() -> Membership:
    return Membership((A, B, C))


def test_nodes_keep_the_order_of_the_hostfile(members: Membership):
    assert [member.spec.name for member in members.all] == ["a", "b", "c"]
    assert "a" in members
    assert "z" not in members


def test_a_node_has_a_place_for_each_device(members: Membership):
    assert members["a"].worker_ids == (WorkerId(node="a", device=0), WorkerId(node="a", device=1))


def test_workers_that_share_a_machine_share_it_over_all_its_nodes(members: Membership):
    assert members.sharing_host(members["b"]) == 3
    assert members.sharing_host(members["c"]) == 1


def test_living_speak_and_ready_train(members: Membership):
    members["a"].move_to(MemberState.CONNECTED)
    members["b"].move_to(MemberState.CONNECTED)
    members["b"].move_to(MemberState.READY)
    assert [member.spec.name for member in members.living] == ["a", "b"]
    assert [member.spec.name for member in members.ready] == ["b"]
    assert members["b"].is_ready
    assert not members["a"].is_ready


def test_all_save_while_no_worker_that_is_ready_lacks_a_place_to_save_in(members: Membership):
    def ready(node: str, *, saves: bool) -> None:
        members[node].move_to(MemberState.CONNECTED)
        members[node].note_ready(
            WorkerUp(t_s=0.0, node=node, device=0, pid=1, data_digest="d", saves=saves), generation=0
        )

    assert not members.all_save, "no worker is ready"
    ready("b", saves=True)
    assert members.all_save
    ready("c", saves=False)
    assert not members.all_save
    members["c"].move_to(MemberState.LOST)
    assert members.all_save


@pytest.mark.parametrize("target", [MemberState.CONNECTING, MemberState.CONNECTED, MemberState.READY, MemberState.LEFT])
def test_the_lost_stay_lost(members: Membership, target: MemberState):
    members["a"].move_to(MemberState.LOST)
    with pytest.raises(PeerError, match=f"a .*{target}.*lost"):
        members["a"].move_to(target)


def test_a_node_is_ready_only_after_it_connected(members: Membership):
    with pytest.raises(PeerError, match=r"a .*ready.*connecting"):
        members["a"].move_to(MemberState.READY)


def test_a_lost_node_may_come_again_as_another_member(members: Membership):
    members["a"].move_to(MemberState.LOST)
    old = members["a"]
    assert members.add(A) is not old
    assert members["a"].state is MemberState.CONNECTING


def test_a_node_that_is_here_cannot_come_again(members: Membership):
    with pytest.raises(UsageError, match="b is"):
        members.add(B)


def test_a_part_in_a_plan_is_for_those_who_were_ready_before_it_and_are_still(members: Membership):
    member = members["a"]
    member.move_to(MemberState.CONNECTED)
    assert not members.took_part("a", 4)
    member.move_to(MemberState.READY)
    member.ready_since = 3
    assert members.took_part("a", 4)
    assert not members.took_part("a", 3)
    member.move_to(MemberState.LOST)
    assert not members.took_part("a", 4)
