from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oobleck.sim.trace import AgentCrashed, Frozen, Joined, Lost, Thawed, Trace
from oobleck.sim.trace.resize import with_nodes, with_spares
from tests.sim.strategies import traces


def test_a_spare_takes_the_place_of_a_lost_node_and_that_stands_by_when_it_is_back() -> None:
    trace = Trace(
        duration_s=1000,
        nodes=("a", "b"),
        start=("a", "b"),
        events=(Lost(t_s=100, node="a"), Joined(t_s=300, node="a"), Lost(t_s=500, node="b")),
    )
    assert with_spares(trace, 1, activation_s=60).events == (
        Lost(t_s=100, node="a"),
        Joined(t_s=160, node="spare0"),
        Lost(t_s=500, node="b"),
        Joined(t_s=560, node="a"),
    )


def test_a_node_that_froze_while_it_stood_by_is_well_when_it_is_needed() -> None:
    events = (
        Lost(t_s=100, node="a"),
        Joined(t_s=200, node="a"),
        Frozen(t_s=300, node="a"),
        Lost(t_s=400, node="b"),
        Thawed(t_s=500, node="a"),
    )
    trace = Trace(duration_s=1000, nodes=("a", "b"), start=("a", "b"), events=events)
    assert with_spares(trace, 1, activation_s=10).events == (
        Lost(t_s=100, node="a"),
        Joined(t_s=110, node="spare0"),
        Lost(t_s=400, node="b"),
        Joined(t_s=410, node="a"),
    )


@given(trace=traces(), num_spares=st.integers(0, 3), activation_s=st.floats(0, 400))
def test_spares_make_a_trace_of_at_least_as_many_nodes(trace: Trace, num_spares: int, activation_s: float) -> None:
    more = with_spares(trace, num_spares, activation_s=activation_s)
    assert len(more.nodes) == len(trace.nodes) + num_spares
    assert max(count for _, count in more.counts) <= len(trace.nodes)


@given(trace=traces(), num_nodes=st.integers(4, 9))
def test_a_cluster_of_another_size_has_so_many_nodes(trace: Trace, num_nodes: int) -> None:
    assert len(with_nodes(trace, max(num_nodes, len(trace.nodes))).nodes) == max(num_nodes, len(trace.nodes))
    first = trace.nodes[0]
    if len(trace.nodes) > 1 and is_ever_there(trace, first):
        assert with_nodes(trace, 1).nodes == (first,)


def is_ever_there(trace: Trace, node: str) -> bool:
    """For any time at all: not if it is lost in the moment in which it comes."""
    after = {0.0: node in trace.start}
    for event in trace.events:
        if isinstance(event, Joined | Lost | AgentCrashed) and event.node == node:
            after[event.t_s] = isinstance(event, Joined)
    return any(after.values())
