"""Which states a node may go through, and who counts as what."""

from __future__ import annotations

import pytest

from oobleck.control.journal import WorkerUp
from oobleck.control.nodes.membership import Membership, MemberState
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
    return Membership.of((A, B, C))


def test_nodes_keep_the_order_of_the_hostfile(members: Membership):
    assert [member.spec.name for member in members.all] == ["a", "b", "c"]
    assert "a" in members
    assert "z" not in members


def test_a_node_has_a_place_for_each_device(members: Membership):
    assert members["a"].worker_ids == (WorkerId(node="a", device=0), WorkerId(node="a", device=1))


def connect(members: Membership, node: str, *, ready: int = 0, generation: int = 0, saves: bool = True) -> None:
    """Have a node's agent speak, and this many of its workers ready."""
    members.note_connected(node, agent_pid=1)
    for device in range(ready):
        make_ready(members, node, device, generation=generation, saves=saves)


def make_ready(members: Membership, node: str, device: int = 0, *, generation: int = 0, saves: bool = True) -> None:
    worker = WorkerUp(t_s=0.0, node=node, device=device, pid=1, data_digest="d", saves=saves)
    members.note_ready(worker, generation=generation)


def test_living_speak_and_ready_train(members: Membership):
    connect(members, "a", ready=1)
    connect(members, "b", ready=1)
    assert [member.spec.name for member in members.living] == ["a", "b"]
    assert [member.spec.name for member in members.ready] == ["b"]
    assert members["b"].is_ready
    assert not members["a"].is_ready


def test_all_save_while_no_worker_that_is_ready_lacks_a_place_to_save_in(members: Membership):
    assert not members.all_save, "no worker is ready"
    connect(members, "b", ready=1, saves=True)
    assert members.all_save
    connect(members, "c", ready=1, saves=False)
    assert not members.all_save
    members.lose("c")
    assert members.all_save


def test_the_lost_stay_lost(members: Membership):
    members.lose("b")
    for state, move in {
        MemberState.CONNECTED: lambda: members.note_connected("b", agent_pid=1),
        MemberState.READY: lambda: make_ready(members, "b"),
        MemberState.LEFT: lambda: members.leave("b"),
    }.items():
        with pytest.raises(PeerError, match=f"b .*{state}.*lost"):
            move()


def test_a_node_is_ready_only_after_it_connected(members: Membership):
    with pytest.raises(PeerError, match=r"b .*ready.*connecting"):
        make_ready(members, "b")


def test_a_lost_node_may_come_again_as_another_member(members: Membership):
    connect(members, "a", ready=1)
    members.lose("a")
    members.add(A)
    assert members["a"].state is MemberState.CONNECTING
    assert not members["a"].ready


def test_a_member_is_what_was_known_when_it_was_read(members: Membership):
    before = members["a"]
    connect(members, "a", ready=2)
    assert before.state is MemberState.CONNECTING
    assert members["a"].is_ready


def test_a_node_that_is_here_cannot_come_again(members: Membership):
    with pytest.raises(UsageError, match="b is"):
        members.add(B)


def test_a_part_in_a_plan_is_for_those_who_were_ready_before_it_and_are_still(members: Membership):
    connect(members, "a", ready=1)
    assert not members.took_part("a", 4)
    make_ready(members, "a", 1, generation=3)
    assert members.took_part("a", 4)
    assert not members.took_part("a", 3)
    members.lose("a")
    assert not members.took_part("a", 4)
