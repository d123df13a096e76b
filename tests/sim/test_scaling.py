"""On how many nodes to train, played through: in the sweep mode, and with the real master and agents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.control.journal import (
    JobEnded,
    JournalEntry,
    Notice,
    PlanAdopted,
    PlanCause,
    RecoveryDone,
    ScalingDecided,
    StepDone,
    StepsDone,
)
from oobleck.control.journal.summary import summarize
from oobleck.errors import ExitCode
from oobleck.job import ScalingSpec
from oobleck.planner import NodeKind, Profile
from oobleck.sim.sweep.settings import SweepSettings
from oobleck.sim.sweep.sweep import sweep
from oobleck.sim.trace import Joined, Lost, MasterCrashed, Trace, TraceEvent
from tests.examples import examples
from tests.planner.drawing import make_layer, make_network, make_profile, uniform_profile
from tests.sim.cluster.test_run import check_whole, entries, run
from tests.sim.strategies import traces

PROFILE = uniform_profile(4, memory_bytes=400, seconds=0.5)
"""A node holds the model, and the network costs nothing: each node adds as much as another."""
COSTLY = make_profile(
    [make_layer(2.0, name="layer", param_bytes=100)],
    memory_bytes=4000,
    network=make_network(inter=100 / 5.33),
)
"""One layer that cannot be cut, and a network that is slow to reduce its gradients: of a batch of 12, six nodes are
the fastest, and the last two of them add 17 % of what each of four gives."""
EFFICIENT = ScalingSpec(policy="efficient")


def make_trace(*events: TraceEvent, num_nodes: int, away: int = 0, duration_s: float = 2000.0) -> Trace:
    nodes = tuple(f"node{number}" for number in range(num_nodes))
    return Trace(duration_s=duration_s, nodes=nodes, start=nodes[: num_nodes - away], events=events)


def settings(scaling: ScalingSpec = EFFICIENT, **changes: object) -> SweepSettings:
    return replace(SweepSettings(profile=PROFILE, global_batch_size=60, scaling=scaling), **changes)  # type: ignore[arg-type]


def decisions(journal: Iterable[JournalEntry]) -> list[ScalingDecided]:
    return [entry for entry in journal if isinstance(entry, ScalingDecided)]


def plans(journal: Iterable[JournalEntry]) -> list[PlanAdopted]:
    return [entry for entry in journal if isinstance(entry, PlanAdopted)]


def costly(*events: TraceEvent, away: int = 0, scaling: ScalingSpec = EFFICIENT) -> tuple[JournalEntry, ...]:
    trace = make_trace(*events, num_nodes=6, away=away)
    return sweep(trace, settings(scaling, profile=COSTLY, global_batch_size=12))


def test_nodes_that_add_little_rest_from_the_start() -> None:
    journal, everybody = costly(), costly(scaling=ScalingSpec())
    (decided,) = decisions(journal)
    assert (decided.num_nodes, decided.num_available, decided.policy) == (4, 6, "efficient")
    (plan,) = plans(journal)
    assert plan.plan.spares == ("node4", "node5")
    assert not plans(everybody)[0].plan.spares
    few, all_ = (summarize(each).steps_committed for each in (journal, everybody))
    assert 0.85 * all_ < few < all_


def test_a_node_that_rests_takes_a_lost_ones_place_at_once() -> None:
    journal = costly(Lost(t_s=500, node="node0"))
    _, second = plans(journal)
    assert len(second.plan.nodes) == 4
    assert second.t_s < 501
    assert "node0" not in second.plan.nodes
    assert len(decisions(journal)) == 1, "the target has not changed"


def test_a_node_that_comes_and_is_not_wanted_stops_nobody() -> None:
    journal = costly(Joined(t_s=500, node="node5"), away=1)
    assert len(plans(journal)) == 1
    assert not [entry for entry in journal if isinstance(entry, RecoveryDone)]


def test_nodes_that_come_and_are_worth_it_are_taken_after_a_minute() -> None:
    events = (Joined(t_s=500, node="node4"), Joined(t_s=510, node="node5"))
    journal = sweep(make_trace(*events, num_nodes=6, away=2), settings())
    first, decided = decisions(journal)
    assert (first.num_nodes, decided.num_nodes) == (4, 6)
    assert 560 <= decided.t_s <= 600
    (recovery,) = [entry for entry in journal if isinstance(entry, RecoveryDone)]
    assert (recovery.cause, set(recovery.nodes)) == (PlanCause.SCALED, {"node4", "node5"})


def finishing(scaling: ScalingSpec, *events: TraceEvent, max_steps: int = 100) -> tuple[JournalEntry, ...]:
    trace = make_trace(*events, num_nodes=6, duration_s=50_000.0)
    return sweep(trace, settings(scaling, max_steps=max_steps))


def test_a_job_of_so_many_steps_ends_with_them() -> None:
    journal = finishing(ScalingSpec())
    assert isinstance(journal[-1], JobEnded)
    assert journal[-1].exit_code == ExitCode.DONE
    assert summarize(journal).steps_committed == 100
    assert journal[-1].t_s == pytest.approx([entry for entry in journal if isinstance(entry, StepsDone)][-1].t_s)


@pytest.mark.parametrize("share", [1.5, 2.5])
def test_a_deadline_releases_nodes_that_it_does_not_need_and_is_met(share: float) -> None:
    fastest_s = finishing(ScalingSpec())[-1].t_s
    spec = ScalingSpec(policy="deadline", deadline_s=share * fastest_s)
    journal = finishing(spec)
    assert spec.deadline_s is not None
    assert fastest_s < journal[-1].t_s <= spec.deadline_s
    assert len(plans(journal)[-1].plan.nodes) < 6
    assert decisions(journal)[1].t_s >= 60


def test_a_deadline_brings_nodes_back_when_the_run_falls_behind() -> None:
    fastest_s = finishing(ScalingSpec())[-1].t_s
    spec = ScalingSpec(policy="deadline", deadline_s=1.6 * fastest_s)
    away = MasterCrashed(t_s=0.4 * fastest_s, down_s=1.0)
    lost = Lost(t_s=0.5 * fastest_s, node=plans(finishing(spec))[-1].plan.nodes[0])
    journal = finishing(spec, away, lost)
    assert journal[-1].t_s <= 1.6 * fastest_s
    assert min(len(plan.plan.nodes) for plan in plans(journal)) < 5


def test_a_deadline_that_cannot_be_met_is_told_once() -> None:
    journal = finishing(ScalingSpec(policy="deadline", deadline_s=100.0))
    told = [entry for entry in journal if isinstance(entry, Notice) and "deadline" in entry.text]
    assert [entry.level for entry in told] == ["warning"]
    assert len(plans(journal)) == 1, "all nodes are used to the end"


def test_nodes_are_set_aside_between_two_steps_and_nobody_computes_in_vain() -> None:
    spec = ScalingSpec(policy="deadline", deadline_s=1e5, hysteresis_s=5.0)
    played = run(scaling=spec, max_steps=200, duration_s=1000.0)
    check_whole(played)
    assert played.end.exit_code == ExitCode.DONE
    assert [entry.record.step for entry in entries(played, StepDone)][-1] == 200
    (recovery,) = entries(played, RecoveryDone)
    assert isinstance(recovery, RecoveryDone)
    assert (recovery.cause, recovery.nodes) == (PlanCause.SCALED, ("n2", "n3"))
    assert (recovery.steps_lost, recovery.microbatches_redone) == (0, 0)
    plan = entries(played, PlanAdopted)[-1]
    assert isinstance(plan, PlanAdopted)
    assert set(plan.plan.spares) == {"n2", "n3"}


def test_a_new_master_keeps_to_the_number_of_nodes() -> None:
    spec = ScalingSpec(policy="deadline", deadline_s=1e5, hysteresis_s=5.0)
    events = (MasterCrashed(t_s=20, down_s=1.0), Lost(t_s=30, node="n0"))
    played = run(*events, scaling=spec, max_steps=200, duration_s=1000.0)
    check_whole(played)
    assert [entry.num_nodes for entry in decisions(played.entries)] == [4, 2]
    after = [entry for entry in entries(played, PlanAdopted, since_s=30.0) if isinstance(entry, PlanAdopted)]
    assert [len(entry.plan.nodes) for entry in after] == [2]


@examples(60)
@given(
    trace=traces(min_nodes=4, max_nodes=7, max_events=10, duration_s=3000.0),
    scaling=st.sampled_from([EFFICIENT, ScalingSpec(policy="deadline", deadline_s=4000.0)]),
    batch=st.sampled_from([4, 12, 60]),
    profile=st.sampled_from([PROFILE, COSTLY]),
    fault_threshold=st.integers(0, 2),
)
def test_on_any_trace_the_number_of_nodes_is_steady_and_safe(
    trace: Trace, scaling: ScalingSpec, batch: int, profile: Profile, fault_threshold: int
) -> None:
    assume(max(count for _, count in trace.counts) > 0)
    job = settings(scaling, profile=profile, global_batch_size=batch, fault_threshold=fault_threshold, max_steps=150)
    journal = sweep(trace, job)
    decided = [entry for entry in decisions(journal) if entry.t_s > 0]
    restarts_s = [entry.t_s for entry in plans(journal) if not entry.plan.pipelines]
    for before, after in pairwise(decided):
        if not any(before.t_s <= restart_s <= after.t_s for restart_s in restarts_s):
            assert after.t_s >= before.t_s + scaling.hysteresis_s
    for entry in decisions(journal):
        assert min(fault_threshold + 1, entry.num_available, batch) <= entry.num_nodes <= entry.num_available
    for plan in plans(journal):
        if plan.plan.spares and plan.plan.pipelines:
            assert plan.redundant or batch <= fault_threshold
    assert sweep(trace, job) == journal


def test_of_several_kinds_the_slow_ones_rest() -> None:
    """Two nodes of four are six times slower: they add too little for what they cost."""
    slow = replace(
        PROFILE,
        layers=tuple(
            replace(layer, forward_s={1: 6 * layer.forward_s[1]}, backward_s={1: 6 * layer.backward_s[1]})
            for layer in PROFILE.layers
        ),
    )
    trace = replace(
        make_trace(Lost(t_s=900.0, node="node1"), num_nodes=4),
        kinds={"node0": "slow", "node1": "fast", "node2": "slow", "node3": "fast"},
    )
    kinds = (NodeKind(name="slow", profile=slow), NodeKind(name="fast", profile=PROFILE))
    journal = list(sweep(trace, settings(kinds=kinds, profile=slow)))
    first, *_ = decisions(journal)
    assert first.num_nodes == 2
    plans = [entry.plan for entry in journal if isinstance(entry, PlanAdopted)]
    assert set(plans[0].nodes) == {"node1", "node3"}
    assert set(plans[0].spares) == {"node0", "node2"}
    assert "node3" in plans[1].nodes
    assert len(plans[1].nodes) == 2, "a slow one takes the place of the lost one: f = 1 asks for it"
