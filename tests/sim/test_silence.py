"""No silence of up to a minute ends a healthy run, whoever is silent: the master, the agents, or all nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import LossCause, NodeLost, PlanAdopted, StepDone
from oobleck.sim.cluster.run import ClusterRun
from oobleck.sim.sweep.settings import SweepSettings
from oobleck.sim.sweep.sweep import sweep
from oobleck.sim.trace import AgentFrozen, Frozen, Healed, MasterFrozen, Partitioned, Thawed, Trace, TraceEvent
from tests.examples import examples
from tests.sim.promises import check_safety
from tests.sim.virtual import Setting

STALLS_S = (2.6, 2.75, 2.9, 5.0, 60.0)
NODES = ("n0", "n1", "n2", "n3")
STRUCK_S = 10.0
BACK_S = 40.0
"""Within this after a silence, steps are committed again: a network tries again after as long as it was cut."""


def run(*events: TraceEvent, seed: int = 0, **fields) -> ClusterRun:
    """A run of long steps whose agents would wait for a master for as long as they do by default."""
    last_s = max(event.t_s + getattr(event, "frozen_s", 0.0) for event in events)
    setting = Setting(events=events, duration_s=last_s + 2 * BACK_S, slowness=20.0, orphan_timeout_s=600.0, **fields)
    played = setting.run(seed=seed, keep_decisions=True)
    check_safety(played, num_microbatches=setting.job.num_microbatches)
    newest = [entry for entry in played.entries if isinstance(entry, StepDone)][-1]
    assert newest.t_s > last_s + BACK_S
    return played


def check_nobody_lost(played: ClusterRun) -> None:
    assert played.end.exit_code == 0, played.end.reason
    assert [entry for entry in played.entries if isinstance(entry, NodeLost)] == []
    assert len([entry for entry in played.entries if isinstance(entry, PlanAdopted)]) == 1


@pytest.mark.parametrize("stall_s", STALLS_S)
def test_a_master_that_is_stopped_loses_nobody(stall_s: float):
    check_nobody_lost(run(MasterFrozen(t_s=STRUCK_S, frozen_s=stall_s)))


@pytest.mark.parametrize("stall_s", STALLS_S)
def test_a_master_that_is_cut_off_from_all_loses_nobody(stall_s: float):
    check_nobody_lost(run(Partitioned(t_s=STRUCK_S, nodes=NODES), Healed(t_s=STRUCK_S + stall_s)))


@pytest.mark.parametrize("stall_s", STALLS_S)
def test_agents_that_are_all_stopped_are_not_lost(stall_s: float):
    check_nobody_lost(run(*(AgentFrozen(t_s=STRUCK_S, node=node, frozen_s=stall_s) for node in NODES)))


@pytest.mark.parametrize("stall_s", STALLS_S)
def test_nodes_that_all_freeze_are_not_lost(stall_s: float):
    frozen = [Frozen(t_s=STRUCK_S, node=node) for node in NODES]
    thawed = [Thawed(t_s=STRUCK_S + stall_s + 0.05 * index, node=node) for index, node in enumerate(NODES)]
    check_nobody_lost(run(*frozen, *thawed))


@pytest.mark.parametrize("stall_s", [5.0, 60.0])
def test_half_of_the_nodes_cut_off_are_waited_for(stall_s: float):
    played = run(Partitioned(t_s=STRUCK_S, nodes=NODES[:2]), Healed(t_s=STRUCK_S + stall_s))
    assert played.end.exit_code == 0
    assert [entry for entry in played.entries if isinstance(entry, NodeLost)] == []


@pytest.mark.parametrize("stall_s", [2.75, 60.0])
@pytest.mark.parametrize("start_s", [1.0, 2.5])
def test_a_master_that_is_stopped_while_it_starts_begins_all_the_same(start_s: float, stall_s: float):
    check_nobody_lost(run(MasterFrozen(t_s=start_s, frozen_s=stall_s)))


@pytest.mark.parametrize("offset_s", [0.001, 0.02, 0.2])
def test_a_silence_while_nodes_are_asked_where_they_stand_loses_no_more_of_them(offset_s: float):
    """One of six is lost, and the master is stopped, or cut off, before it has their answers, or they their orders."""
    lost = Frozen(t_s=STRUCK_S, node="n5")
    noticed_s = STRUCK_S + 3.1 + offset_s
    others = tuple(f"n{index}" for index in range(5))
    for events in (
        (MasterFrozen(t_s=noticed_s, frozen_s=40.0),),
        (Partitioned(t_s=noticed_s, nodes=others), Healed(t_s=noticed_s + 40.0)),
    ):
        played = run(lost, *events, num_nodes=6)
        assert played.end.exit_code == 0, played.end.reason
        assert {entry.node for entry in played.entries if isinstance(entry, NodeLost)} == {"n5"}


def test_one_of_many_that_freezes_is_lost_soon_after_its_lease():
    played = run(Frozen(t_s=STRUCK_S, node="n1"))
    (lost,) = [entry for entry in played.entries if isinstance(entry, NodeLost)]
    assert (lost.node, lost.loss.cause) == ("n1", LossCause.LEASE_EXPIRED)
    assert lost.t_s <= STRUCK_S + Setting().job.control.lease_s + 0.5


def test_most_nodes_that_freeze_for_good_are_lost_after_two_minutes():
    frozen = [Frozen(t_s=STRUCK_S, node=node) for node in NODES[:2]]
    setting = Setting(events=tuple(frozen), duration_s=300.0, orphan_timeout_s=600.0, fault_threshold=2)
    lost = [entry for entry in setting.run().entries if isinstance(entry, NodeLost)]
    assert {entry.node for entry in lost} == set(NODES[:2])
    assert [entry.t_s for entry in lost] == pytest.approx([STRUCK_S + 120.0] * 2, abs=1.0)


stalls = st.tuples(
    st.sampled_from(("master", "agent", "agents", "cut", "nodes")),
    st.floats(0.1, 60.0),
    st.floats(20.0, 60.0),
    st.integers(0, 5),
)


@examples(6)
@given(storm=st.lists(stalls, min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_a_storm_of_stalls_ends_no_run(storm: list[tuple[str, float, float, int]], seed: int):
    """Whatever stalls, for however long up to a minute, the run goes on; only a node that stalls alone may be lost."""
    nodes = tuple(f"n{index}" for index in range(6))
    events: list[TraceEvent] = []
    now_s, alone = 6.0, set()
    for kind, stall_s, rest_s, number in storm:
        match kind:
            case "master":
                events.append(MasterFrozen(t_s=now_s, frozen_s=stall_s))
            case "agent":
                alone.add(nodes[number])
                events.append(AgentFrozen(t_s=now_s, node=nodes[number], frozen_s=stall_s))
            case "agents":
                events += [AgentFrozen(t_s=now_s, node=node, frozen_s=stall_s) for node in nodes]
            case "cut":
                events += [Partitioned(t_s=now_s, nodes=nodes), Healed(t_s=now_s + stall_s)]
            case "nodes":
                events += [Frozen(t_s=now_s, node=node) for node in nodes]
                events += [Thawed(t_s=now_s + stall_s, node=node) for node in nodes]
        now_s += stall_s + rest_s
    setting = Setting(
        events=tuple(events),
        num_nodes=6,
        heartbeat_interval_s=1.0,
        duration_s=now_s + BACK_S,
        orphan_timeout_s=600.0,
        slowness=20.0,
    )
    played = setting.run(seed=seed, keep_decisions=True)
    check_safety(played, num_microbatches=setting.job.num_microbatches)
    assert played.end.exit_code == 0, played.end.reason
    assert {entry.node for entry in played.entries if isinstance(entry, NodeLost)} <= alone
    assert [entry for entry in played.entries if isinstance(entry, StepDone)][-1].t_s > now_s


def swept(*events: TraceEvent) -> list[NodeLost]:
    setting = Setting()
    trace = Trace(duration_s=1000.0, nodes=NODES, start=NODES, events=events)
    settings = SweepSettings(profile=setting.profile, global_batch_size=setting.job.global_batch_size)
    return [entry for entry in sweep(trace, settings) if isinstance(entry, NodeLost)]


@pytest.mark.parametrize("stall_s", STALLS_S)
def test_the_sweep_mode_loses_nobody_by_a_silence_of_most(stall_s: float):
    at_s = 100.0
    assert swept(MasterFrozen(t_s=at_s, frozen_s=stall_s)) == []
    assert swept(Partitioned(t_s=at_s, nodes=NODES), Healed(t_s=at_s + stall_s)) == []
    assert swept(*(AgentFrozen(t_s=at_s, node=node, frozen_s=stall_s) for node in NODES)) == []
    frozen = [Frozen(t_s=at_s, node=node) for node in NODES]
    assert swept(*frozen, *(Thawed(t_s=at_s + stall_s, node=node) for node in NODES)) == []


def test_the_sweep_mode_loses_a_node_whose_agent_is_stopped_for_longer_than_its_lease():
    assert [lost.node for lost in swept(AgentFrozen(t_s=100.0, node="n1", frozen_s=30.0))] == ["n1"]
