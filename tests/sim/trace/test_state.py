"""What events do to nodes."""

from __future__ import annotations

from hypothesis import given

from oobleck.sim.trace import (
    AgentCrashed,
    ClusterState,
    Frozen,
    Healed,
    Joined,
    Lost,
    MasterCrashed,
    Partitioned,
    Slowed,
    Thawed,
    Trace,
    TraceEvent,
)
from tests.sim.strategies import traces


def after(*events: TraceEvent) -> ClusterState:
    cluster = ClusterState(("a", "b", "c"))
    for event in events:
        assert cluster.problem(event) is None
        cluster.apply(event)
    return cluster


def test_a_loss_ends_all_that_was_wrong_with_a_node():
    wrong = (Slowed(t_s=1, node="a", factor=2.0), Frozen(t_s=2, node="a"), Partitioned(t_s=3, nodes=("a", "b")))
    assert after(*wrong).well == {"c"}
    back = after(*wrong, Lost(t_s=4, node="a"), Joined(t_s=5, node="a"))
    assert back.well == {"a", "c"}
    assert back.factors == {}


def test_a_partition_of_the_nodes_own_network_leaves_them_well_until_it_ends():
    cluster = after(Partitioned(t_s=1, nodes=("a",), spares_master=True))
    assert (cluster.well, cluster.problem(Healed(t_s=2))) == ({"a", "b", "c"}, None)
    assert cluster.apply(Partitioned(t_s=1, nodes=("b",), spares_master=True)) == ()
    assert cluster.apply(Healed(t_s=2)) == ()
    assert cluster.problem(Healed(t_s=3)) == "there is no partition"


def test_a_partition_is_told_of_nodes_that_it_newly_cuts_and_its_end_of_all():
    cluster = after(AgentCrashed(t_s=1, node="c"), Partitioned(t_s=2, nodes=("b",)))
    assert cluster.apply(Partitioned(t_s=3, nodes=("c", "b", "a"))) == ("a",)
    assert cluster.apply(Healed(t_s=4)) == ("a", "b")
    assert cluster.problem(Healed(t_s=5))


def test_a_frozen_node_can_only_thaw_or_be_lost():
    cluster = after(Frozen(t_s=1, node="a"))
    assert str(cluster.problem(AgentCrashed(t_s=2, node="a"))).startswith("a ")
    assert cluster.problem(Lost(t_s=2, node="a")) is None
    assert cluster.problem(Thawed(t_s=2, node="a")) is None


@given(trace=traces())
def test_the_well_are_among_those_that_are_there(trace: Trace):
    cluster = ClusterState(trace.start)
    for event in trace.events:
        assert cluster.problem(event) is None
        cluster.apply(event)
        assert cluster.well <= cluster.here <= set(trace.nodes)
        assert cluster.frozen | cluster.cut | cluster.factors.keys() <= cluster.here


def test_what_happens_to_a_master_happens_to_no_node():
    assert ClusterState(("a",)).apply(MasterCrashed(t_s=1)) == ()
