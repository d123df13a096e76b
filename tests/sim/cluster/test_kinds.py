"""Virtual nodes of several kinds: their profiles, one that joins of an unknown kind, and both modes with one plan."""

from __future__ import annotations

from dataclasses import replace

from oobleck.control.journal import JournalEntry, NodeAdded, PlanAdopted, ProfileKnown, StepDone, StepsDone
from oobleck.planner import NodeKind
from oobleck.sim.cluster.run import run_cluster
from oobleck.sim.sweep import SweepSettings, sweep
from oobleck.sim.trace import Joined, Lost, Trace
from tests.sim.virtual import Setting

SETTING = Setting(slowness=5.0, heartbeat_interval_s=1.0, max_steps=1_000_000)
NODES = ("f0", "f1", "s0", "w0")
KINDS = dict(zip(NODES, ("fast", "fast", "slow", "wide"), strict=True))
TRACE = Trace(
    duration_s=120.0,
    nodes=NODES,
    start=NODES,
    events=(Lost(t_s=60.0, node="f1"), Joined(t_s=80.0, node="f1")),
    kinds=KINDS,
)


def kinds() -> tuple[NodeKind, ...]:
    plain = SETTING.profile
    slow = tuple(
        replace(layer, forward_s={1: 2 * layer.forward_s[1]}, backward_s={1: 2 * layer.backward_s[1]})
        for layer in plain.layers
    )
    return (
        NodeKind(name="fast", profile=plain),
        NodeKind(name="slow", profile=replace(plain, layers=slow)),
        NodeKind(name="wide", profile=plain, devices_per_node=2),
    )


def plans(entries: tuple[JournalEntry, ...]) -> list[PlanAdopted]:
    return [entry for entry in entries if isinstance(entry, PlanAdopted)]


def test_both_modes_plan_alike_and_take_as_long():
    job = replace(SETTING.job, global_batch_size=18 * SETTING.job.microbatch_size)
    played = run_cluster(TRACE, job=job, profile=SETTING.profile, kinds=kinds())
    settings = SweepSettings(
        profile=SETTING.profile,
        kinds=kinds(),
        global_batch_size=job.global_batch_size,
        fault_threshold=job.fault_threshold,
    )
    swept = tuple(sweep(TRACE, settings))
    assert [entry.plan for entry in plans(played.entries)] == [entry.plan for entry in plans(swept)]
    (first, *_) = plans(swept)
    assert {node for each in first.plan.pipelines for node in each.nodes} == set(NODES)
    steps_s = [entry.record.duration_s for entry in played.entries if isinstance(entry, StepDone)]
    swept_s = [entry.record.duration_s for entry in swept if isinstance(entry, StepDone | StepsDone)]
    assert abs(steps_s[1] / swept_s[0] - 1) < 0.02


def test_a_node_of_a_new_kind_is_measured_and_then_planned_for():
    trace = Trace(duration_s=90.0, nodes=NODES, start=("f0", "f1"), events=(Joined(t_s=30.0, node="w0"),), kinds=KINDS)
    entries = run_cluster(trace, job=SETTING.job, profile=SETTING.profile, kinds=kinds()).entries
    known = {entry.kind: entry.t_s for entry in entries if isinstance(entry, ProfileKnown)}
    assert list(known) == ["fast", "wide×2"]
    (added,) = (entry for entry in entries if isinstance(entry, NodeAdded))
    assert added.t_s < known["wide×2"]
    before, after = plans(entries)
    assert "w0" not in before.plan.nodes
    assert "w0" in after.plan.nodes
    assert after.t_s >= known["wide×2"]
    swept = sweep(
        trace, SweepSettings(profile=SETTING.profile, kinds=kinds(), global_batch_size=SETTING.job.global_batch_size)
    )
    assert [entry.plan for entry in plans(tuple(swept))][-1].nodes == after.plan.nodes
