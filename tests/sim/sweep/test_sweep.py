from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import TypeVar

import pytest
from hypothesis import assume, example, given, reject
from hypothesis import strategies as st

from oobleck.control.journal import (
    JournalEntry,
    LossCause,
    NodeAdded,
    NodeLeft,
    NodeLost,
    PlanAdopted,
    PlanCause,
    RecoveryDone,
    StepsDone,
    TerminationNoticed,
)
from oobleck.control.journal.summary import Summary, summarize
from oobleck.errors import PlanningError
from oobleck.job import ScheduleName
from oobleck.planner import NodeKind, Profile, WorkerId
from oobleck.schedule import ScheduleKind
from oobleck.schedule.forecast import forecast
from oobleck.sim.costs.model import Costs
from oobleck.sim.sweep.settings import SweepSettings
from oobleck.sim.sweep.sweep import sweep
from oobleck.sim.trace import (
    AgentCrashed,
    AgentFrozen,
    Frozen,
    Healed,
    Joined,
    Lost,
    MasterCrashed,
    Noticed,
    Partitioned,
    Slowed,
    Thawed,
    Trace,
    TraceEvent,
    WorkerCrashed,
)
from tests.examples import examples
from tests.planner.drawing import profiles, uniform_profile
from tests.sim.strategies import traces

T = TypeVar("T")

PROFILE = uniform_profile(4, memory_bytes=40, seconds=0.5)
"""Two layers fit a node, so that two nodes hold the model."""
FREE = Costs(**{part.name: 0.0 for part in dataclasses.fields(Costs)} | {"lease_s": 3.0})
FOUR = ("node0", "node1", "node2", "node3")
FIVE = (*FOUR, "node4")


def make_trace(*events: TraceEvent, nodes: tuple[str, ...] = FOUR, duration_s: float = 1000.0) -> Trace:
    return Trace(duration_s=duration_s, nodes=nodes, start=nodes, events=events)


def make_settings(**changes: object) -> SweepSettings:
    return dataclasses.replace(
        SweepSettings(profile=PROFILE, global_batch_size=8, costs=FREE, checkpoint_interval_s=100.0),
        **changes,  # type: ignore[arg-type]
    )


def play(*events: TraceEvent, **changes: object) -> tuple[JournalEntry, ...]:
    return sweep(make_trace(*events), make_settings(**changes))


def only(entries: Iterable[JournalEntry], kind: type[T]) -> list[T]:
    return [entry for entry in entries if isinstance(entry, kind)]


def test_without_events_steps_follow_one_another_from_start_to_end() -> None:
    journal = play()
    (steps,) = only(journal, StepsDone)
    (plan,) = only(journal, PlanAdopted)
    assert steps.record.duration_s == pytest.approx(forecast(PROFILE, plan.plan).step_s)
    assert steps.num_steps == int(1000 / steps.record.duration_s)
    assert steps.t_s == pytest.approx(steps.num_steps * steps.record.duration_s)
    assert summarize(journal).goodput > 0.99


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble", "auto"])
def test_steps_take_what_the_timelines_of_the_orders_schedules_say(schedule: ScheduleName) -> None:
    # Three layers fit a node: pipelines of four, with stages that differ once a node is lost.
    settings = {"schedule": schedule, "profile": uniform_profile(8, memory_bytes=60, seconds=0.5)}
    nodes = tuple(f"node{number}" for number in range(9))
    journal = sweep(make_trace(Lost(t_s=501, node="node0"), nodes=nodes), make_settings(**settings))
    chosen = None if schedule == "auto" else ScheduleKind(schedule)
    plans = only(journal, PlanAdopted)
    assert len(plans) == 2
    for plan in plans:
        expected = forecast(settings["profile"], plan.plan, kind=chosen)
        under, *_finished = [each for each in only(journal, StepsDone) if each.record.generation == plan.generation]
        assert under.record.duration_s == pytest.approx(expected.step_s)
        assert under.num_steps > 60
        kinds = {index: each.timeline.schedule.kind for each in expected.pipelines for index in each.pipelines}
        assert plan.schedules == tuple(kinds[index] for index in range(len(plan.schedules)))


@examples(40)
@given(profile=profiles(min_layers=2, max_layers=6), num_nodes=st.integers(2, 6))
def test_a_sweep_that_chooses_its_schedules_never_has_slower_steps_than_1f1b(profile: Profile, num_nodes: int) -> None:
    nodes = tuple(f"node{number}" for number in range(num_nodes))
    trace = make_trace(nodes=nodes, duration_s=1e4)
    job = make_settings(profile=profile, global_batch_size=8 * profile.microbatch_size, fault_threshold=0, max_steps=9)
    try:
        plain, chosen = (sweep(trace, dataclasses.replace(job, schedule=name)) for name in ("1f1b", "auto"))
    except PlanningError:
        reject()
    before, after = (only(journal, StepsDone) for journal in (plain, chosen))
    assert [each.num_steps for each in before] == [each.num_steps for each in after] == [9]
    # Another schedule than 1F1B has to save one percent, and so has a plan that suits it.
    assert after[0].record.duration_s <= before[0].record.duration_s * 1.01


def test_a_lost_node_costs_no_step() -> None:
    journal = play(Lost(t_s=101, node="node3"))
    summary = summarize(journal)
    (recovery,) = summary.recoveries
    assert (recovery.cause, recovery.nodes) == ("connection_lost", ("node3",))
    assert (summary.steps_lost, summary.samples_missing, summary.samples_repeated) == (0, 0, 0)
    assert summary.steps_committed == only(journal, StepsDone)[-1].record.step


def test_the_step_in_flight_is_finished_by_the_whole_pipelines() -> None:
    usual_s = only(play(), StepsDone)[0].record.duration_s
    journal = play(Lost(t_s=21 * usual_s - 0.5, node="node3"))
    before, during, _after = only(journal, StepsDone)
    assert before.record.step == 20
    assert (during.first_step, during.record.step) == (21, 21)
    # The whole pipeline takes its own four microbatches, then the four of the broken one.
    assert during.record.duration_s == pytest.approx(2 * usual_s, abs=0.1)
    (recovery,) = only(journal, RecoveryDone)
    assert recovery.stall_s == pytest.approx(recovery.transfer_s)


def test_a_step_that_has_only_begun_is_run_again_by_all_where_that_is_quicker() -> None:
    usual_s = only(play(), StepsDone)[0].record.duration_s
    journal = play(Lost(t_s=20 * usual_s + 0.5, node="node3"))
    before, after = only(journal, StepsDone)
    assert (before.record.step, after.first_step) == (20, 21)
    reason = only(journal, PlanAdopted)[-1].reason
    again = re.search(r"step 21 is run again, in ([\d.]+) s: finishing it takes ([\d.]+) s", reason)
    assert again is not None
    anew_s, finish_s = map(float, again.groups())
    # One pipeline would take eight microbatches; the three nodes that are left take them in less.
    assert finish_s == pytest.approx(2 * usual_s, abs=0.3)
    assert anew_s < finish_s
    # All three nodes train on: the copy of a layer to the third one repays itself in the first step.
    (recovery,) = only(journal, RecoveryDone)
    assert recovery.stall_s < 0.2
    began_s = 20 * usual_s + 0.5 + recovery.stall_s
    assert after.t_s - after.num_steps * after.record.duration_s == pytest.approx(began_s)
    assert after.record.duration_s < 2 * usual_s - 1.0
    summary = summarize(journal)
    assert (summary.steps_lost, summary.samples_missing, summary.samples_repeated) == (0, 0, 0)


def test_when_every_pipeline_has_lost_a_node_the_step_is_run_again() -> None:
    nodes = tuple(f"node{number}" for number in range(8))
    settings = make_settings(num_pipelines=4, fault_threshold=1)
    undisturbed = sweep(make_trace(nodes=nodes), settings)
    usual_s = only(undisturbed, StepsDone)[0].record.duration_s
    # The second stages of two pipelines, the first stages of the others: one copy of each layer is left, or two.
    plan = only(undisturbed, PlanAdopted)[0].plan
    gone = [pipeline.nodes[index % 2] for index, pipeline in enumerate(plan.pipelines)]
    journal = sweep(make_trace(*(Lost(t_s=10 * usual_s + 1.0, node=node) for node in gone), nodes=nodes), settings)
    recovery = only(journal, RecoveryDone)[-1]
    assert set(recovery.nodes) == set(gone)
    assert recovery.stall_s == pytest.approx(recovery.decide_s + recovery.transfer_s)
    assert only(journal, StepsDone)[1].first_step == 11
    assert summarize(journal).steps_lost == 0


def test_a_joined_node_is_absorbed_without_a_loss() -> None:
    journal = play(Lost(t_s=100, node="node3"), Joined(t_s=200, node="node3"))
    loss, join = only(journal, RecoveryDone)
    assert (join.cause, join.nodes) == (PlanCause.JOINED, ("node3",))
    assert join.stall_s <= join.transfer_s + 1e-9
    assert len(only(journal, PlanAdopted)[-1].plan.nodes) == 4
    assert loss.generation < join.generation


def test_a_frozen_node_costs_its_lease() -> None:
    journal = play(Frozen(t_s=100, node="node0"))
    (recovery,) = only(journal, RecoveryDone)
    assert recovery.why is LossCause.LEASE_EXPIRED
    assert recovery.began_s == pytest.approx(103)


def test_a_node_that_thaws_within_its_lease_costs_its_pause_alone() -> None:
    frozen = summarize(play(Frozen(t_s=100, node="node0"), Thawed(t_s=102, node="node0")))
    assert not frozen.recoveries
    assert frozen.steps_committed == pytest.approx(summarize(play()).steps_committed, abs=1)


def test_a_node_that_thaws_after_its_lease_joins_again() -> None:
    journal = play(Frozen(t_s=100, node="node0"), Thawed(t_s=200, node="node0"))
    assert [recovery.why for recovery in only(journal, RecoveryDone)] == [LossCause.LEASE_EXPIRED, PlanCause.JOINED]


def test_nodes_that_are_cut_off_for_long_are_given_up_and_taken_back() -> None:
    journal = play(Partitioned(t_s=100, nodes=("node0", "node1")), Healed(t_s=300))
    causes = [recovery.why for recovery in only(journal, RecoveryDone)]
    assert causes[0] is LossCause.LEASE_EXPIRED
    assert set(causes[1:]) == {PlanCause.JOINED}
    assert len(only(journal, PlanAdopted)[-1].plan.nodes) == 4


def test_a_slow_node_slows_all_until_it_is_well() -> None:
    journal = play(Slowed(t_s=300, node="node0", factor=2), Slowed(t_s=330, node="node0", factor=1))
    usual, slow, again = (
        step_s for step_s, _ in groupby(steps.record.duration_s for steps in only(journal, StepsDone))
    )
    assert usual == again < slow
    assert len(only(journal, PlanAdopted)) == 1  # so short a slow-down is not planned for


def test_a_crashed_worker_comes_back_in_its_place() -> None:
    journal = play(WorkerCrashed(t_s=100, node="node0"), costs=dataclasses.replace(FREE, worker_start_s=0.5))
    assert len(only(journal, PlanAdopted)[-1].plan.nodes) == 4
    assert summarize(journal).steps_lost == 0


def test_a_node_whose_device_fails_again_and_again_is_added_whole() -> None:
    """As a user would who has had it repaired."""
    crashes = [WorkerCrashed(t_s=100.0 + 5 * number, node="node0", device=1) for number in range(4)]
    kinds = (NodeKind(name="wide", profile=PROFILE, devices_per_node=2),)
    trace = dataclasses.replace(make_trace(*crashes), kinds=dict.fromkeys(FOUR, "wide"))
    journal = sweep(trace, make_settings(kinds=kinds, costs=dataclasses.replace(FREE, worker_start_s=0.5)))
    assert [len(added.node.devices) for added in only(journal, NodeAdded)] == [1, 2]
    assert "a node of a sweep has all of its devices" in str(only(journal, NodeLost)[1].loss)
    last = only(journal, PlanAdopted)[-1].plan
    assert {each for each in last.worker_ids if each.node == "node0"} == {WorkerId("node0", 0), WorkerId("node0", 1)}


def test_a_crashed_agent_is_a_lost_node() -> None:
    assert play(AgentCrashed(t_s=100, node="node0")) == play(Lost(t_s=100, node="node0"))


def test_a_loss_without_a_master_is_met_by_its_successor() -> None:
    journal = play(MasterCrashed(t_s=100, down_s=5), Lost(t_s=101, node="node3"))
    (recovery,) = only(journal, RecoveryDone)
    assert recovery.began_s == pytest.approx(105)


def test_a_notice_drains_the_node_before_it_goes() -> None:
    journal = play(Noticed(t_s=100, node="node3", grace_s=30), Lost(t_s=130, node="node3"))
    assert [left.node for left in only(journal, NodeLeft)] == ["node3"]
    (recovery,) = only(journal, RecoveryDone)
    assert recovery.cause is PlanCause.DRAINED


def test_when_all_nodes_have_notice_the_job_saves_its_step_and_continues_on_the_next_nodes() -> None:
    """At a batch job's time limit. Without notice, the steps since the checkpoint at 300 s would be lost."""
    events = [Noticed(t_s=350, node=node, grace_s=60) for node in FOUR]
    events += [Lost(t_s=410, node=node) for node in FOUR] + [Joined(t_s=600, node=node) for node in FOUR]
    journal = play(*events)
    assert len(only(journal, TerminationNoticed)) == len(FOUR)
    summary = summarize(journal)
    assert summary.steps_lost == 0
    stopped_s, resumed_s = (plan.t_s for plan in only(journal, PlanAdopted)[-2:])
    assert stopped_s < 360
    assert resumed_s == pytest.approx(600, abs=0.1)
    assert all(later.first_step == sooner.record.step + 1 for sooner, later in pairwise(only(journal, StepsDone)))


def test_nodes_that_stay_after_a_notice_are_used_again_once_its_time_is_over() -> None:
    journal = play(*[Noticed(t_s=350, node=node, grace_s=60) for node in FOUR])
    assert only(journal, PlanAdopted)[-1].t_s == pytest.approx(410, abs=0.1)
    assert summarize(journal).steps_lost == 0


def test_when_all_copies_are_lost_the_job_goes_on_from_its_checkpoint() -> None:
    usual_s = only(play(), StepsDone)[0].record.duration_s
    events = [Lost(t_s=250, node=node) for node in FOUR] + [Joined(t_s=400, node=node) for node in FOUR]
    journal = play(*events)
    summary = summarize(journal)
    assert summary.recoveries[-1].action == "checkpoint"
    # The checkpoint at 200 s holds the steps that were committed by then.
    assert summary.steps_lost == int(250 / usual_s) - int(200 / usual_s)
    assert summary.downtime_s["idle"] == pytest.approx(150, abs=0.1)
    assert summary.downtime_s["redone"] == pytest.approx(summary.steps_lost * usual_s)
    assert summary.steps_committed == only(journal, StepsDone)[-1].record.step


def check_node_hours(summary: Summary, trace: Trace) -> None:
    found = summary.node_hours
    assert found is not None
    parts = (found.training, found.recovering, found.idle, found.other)
    assert min(parts) >= -1e-9
    assert sum(parts) == pytest.approx(found.there)
    assert found.there <= len(trace.nodes) * summary.elapsed_s / 3600 + 1e-9


def test_node_hours_tell_what_nodes_were_there_for() -> None:
    four = summarize(play()).node_hours
    assert four is not None
    assert four.there == pytest.approx(4 * 1000 / 3600)
    assert four.training == pytest.approx(four.there, rel=0.01)
    lost = summarize(play(Lost(t_s=500, node="node3"))).node_hours
    assert lost is not None
    assert lost.there == pytest.approx(3.5 * 1000 / 3600)
    # Two nodes hold the model, but one does not: with a single one left there is no plan.
    waiting = summarize(play(*(Lost(t_s=500, node=node) for node in FOUR[1:]))).node_hours
    assert waiting is not None
    assert waiting.there == pytest.approx(2.5 * 1000 / 3600)
    assert waiting.idle == pytest.approx(0.5 * 1000 / 3600, rel=0.01)
    assert waiting.per_million_tokens is not None
    assert four.per_million_tokens is not None
    assert waiting.per_million_tokens > four.per_million_tokens


@examples(60)
@given(trace=traces(min_nodes=2, max_nodes=6, duration_s=500.0, kinds=(Lost, Joined)))
def test_node_hours_there_are_those_of_the_trace(trace: Trace) -> None:
    try:
        found = summarize(sweep(trace, make_settings(fault_threshold=0))).node_hours
    except PlanningError:
        reject()
    assert found is not None
    ends_s = [*(t_s for t_s, _ in trace.counts[1:]), trace.duration_s]
    there_s = sum(count * (end_s - t_s) for (t_s, count), end_s in zip(trace.counts, ends_s, strict=True))
    # A node that comes while the job is started waits a moment, until it is asked again.
    assert found.there == pytest.approx(there_s / 3600, abs=5 / 3600)


def test_too_few_nodes_wait_for_more() -> None:
    trace = Trace(duration_s=1000, nodes=FOUR, start=("node0",), events=(Joined(t_s=300, node="node1"),))
    summary = summarize(sweep(trace, make_settings()))
    assert summary.steps_committed == pytest.approx(700 / (2 * 4 * 1.0 + 1.0), abs=1)


def account_is_whole(summary: Summary, duration_s: float) -> bool:
    useful_s = summary.goodput * summary.elapsed_s
    return useful_s + sum(summary.downtime_s.values()) == pytest.approx(duration_s, abs=1e-6)


def is_left_in_peace(trace: Trace) -> bool:
    """Tell whether enough nodes are there at the end, whole and well, for long enough to have trained."""
    unsettling = (Frozen, Partitioned, Slowed, MasterCrashed, Noticed)
    last_s = trace.events[-1].t_s if trace.events else 0.0
    is_calm = last_s < trace.duration_s - 300 and not any(isinstance(event, unsettling) for event in trace.events)
    return is_calm and trace.counts[-1][1] >= 2


STEP_THAT_NOBODY_COULD_REPORT = Trace(
    duration_s=1000.0,
    nodes=FIVE,
    start=("node0", "node2", "node3", "node4"),
    events=(
        Slowed(t_s=0.0, node="node4", factor=10.0),
        Joined(t_s=0.001, node="node1"),
        AgentFrozen(t_s=1.0, node="node1", frozen_s=12.7),
        Partitioned(t_s=1.0, nodes=FIVE),
        WorkerCrashed(t_s=1.0, node="node0"),
        Healed(t_s=42.0),
        Lost(t_s=42.0, node="node3"),
        Joined(t_s=43.0, node="node3"),
        Lost(t_s=143.0, node="node0"),
    ),
)
"""It was committed while all were cut off: the answers to the fence told of it, and then a later step did again."""


@examples(300)
@example(trace=STEP_THAT_NOBODY_COULD_REPORT, fault_threshold=0, is_free=True)
@given(
    trace=traces(min_nodes=3, max_nodes=7, max_events=15),
    fault_threshold=st.integers(0, 2),
    is_free=st.booleans(),
)
def test_any_trace_is_played_to_its_end(trace: Trace, fault_threshold: int, is_free: bool) -> None:
    assume(max(count for _, count in trace.counts) >= 2)
    costs = FREE if is_free else Costs()
    journal = sweep(trace, make_settings(fault_threshold=fault_threshold, costs=costs))
    summary = summarize(journal)
    assert account_is_whole(summary, trace.duration_s)
    assert 0 <= summary.goodput <= 1
    assert (summary.samples_missing, summary.samples_repeated) == (0, 0)
    assert all(earlier.t_s <= later.t_s + 1e-6 for earlier, later in pairwise(journal))
    if is_left_in_peace(trace):
        assert only(journal, StepsDone)[-1].t_s > trace.duration_s - 100
    for entry in only(journal, PlanAdopted):
        if entry.plan.pipelines:
            assert entry.plan.num_microbatches == 8
    check_node_hours(summarize(journal), trace)
    assert sweep(trace, make_settings(fault_threshold=fault_threshold, costs=costs)) == journal


def test_all_workers_at_once_cost_the_steps_since_the_newest_checkpoint_and_no_node() -> None:
    journal = play(*(WorkerCrashed(t_s=500.0, node=f"node{number}") for number in range(4)))
    assert [done.steps_lost for done in only(journal, RecoveryDone)] == [20]
    assert only(journal, NodeLost) == []
    assert [steps.first_step for steps in only(journal, StepsDone)] == [1, 78, 98]
