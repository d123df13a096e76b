from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from oobleck.cli.main import main
from oobleck.sim.costs.model import Costs
from oobleck.sim.costs.outcome import Activity, Outcome
from oobleck.sim.policies.registry import POLICIES, PolicySettings
from oobleck.sim.policies.stop_and_go import Rules, adjacent_in_grid, play
from oobleck.sim.policies.throughput import Grids, Plans, RedundantGrids, redundant_profile
from oobleck.sim.sweep.settings import SweepSettings
from oobleck.sim.trace import Joined, Lost, Slowed, Trace, TraceEvent, WorkerCrashed
from tests.examples import examples
from tests.planner.drawing import uniform_profile
from tests.sim.strategies import traces
from tools.paper import Table

JOB = SweepSettings(
    profile=uniform_profile(4, memory_bytes=80, seconds=0.5),
    global_batch_size=8,
    costs=Costs(node_start_s=0, node_start_node_s=0),
    checkpoint_interval_s=100,
)
TABLE = Table({2: 2.0, 3: 3.0, 4: 4.0}, batch_size=8)


def make_trace(*events: TraceEvent, num_nodes: int = 4, duration_s: float = 1000.0) -> Trace:
    nodes = tuple(f"node{number}" for number in range(num_nodes))
    return Trace(duration_s=duration_s, nodes=nodes, start=nodes, events=events)


def make_rules(**changes: object) -> Rules:
    rules = Rules(name="rules", about="", throughput=TABLE, batch_size=8, pause_s=10)
    return dataclasses.replace(rules, **changes)  # type: ignore[arg-type]


def seconds_of(outcome: Outcome, activity: Activity) -> float:
    return sum(each.stop_s - each.start_s for each in outcome.stretches if each.activity is activity)


def test_without_failures_a_table_is_all_that_counts() -> None:
    outcome = play(make_trace(), make_rules())
    assert outcome.samples_per_s == pytest.approx(4.0)
    assert outcome.summary.goodput == 1.0


def test_a_loss_costs_the_pause_and_all_since_the_checkpoint() -> None:
    # Steps take 2 s, checkpoints 10 s after every 45 of them: at 350 s three are made, and 20 s of work are lost.
    rules = make_rules(checkpoint_every_steps=45, checkpoint_s=10.0)
    outcome = play(make_trace(Lost(t_s=320, node="node0")), rules)
    assert outcome.summary.steps_lost == 10
    assert outcome.summary.downtime_s["redone"] == pytest.approx(20)
    assert outcome.summary.downtime_s["reconfiguring"] == pytest.approx(10)
    # 135 steps before; then 670 s in cycles of 45 steps of 8 / 3 s and a checkpoint.
    cycle_s = 45 * 8 / 3 + 10
    after = int(670 // cycle_s) * 45 + min(45, 670 % cycle_s / (8 / 3))
    assert outcome.summary.samples_committed == pytest.approx((135 + after) * 8, abs=8)


def test_a_system_that_keeps_its_state_loses_the_step_in_flight_alone() -> None:
    outcome = play(make_trace(Lost(t_s=101, node="node0")), make_rules(rolls_back=None))
    assert outcome.summary.downtime_s["redone"] == pytest.approx(1.0)
    assert outcome.summary.samples_committed == pytest.approx(50 * 8 + 3 * (1000 - 111), abs=8)


def test_nodes_that_join_wait_for_the_next_loss_or_take_part_at_once() -> None:
    events = (Lost(t_s=100, node="node0"), Joined(t_s=200, node="node0"))
    waiting = play(make_trace(*events), make_rules(rolls_back=None))
    at_once = play(make_trace(*events), make_rules(rolls_back=None, joins_at_once=True, join_pause_s=5))
    assert waiting.samples_per_s == pytest.approx((400 + 3 * 890) / 1000, abs=0.01)
    assert at_once.samples_per_s == pytest.approx((400 + 3 * 90 + 4 * 795) / 1000, abs=0.02)


def test_nodes_join_at_once_only_if_the_pause_repays_itself_before_the_next_loss() -> None:
    events = (Lost(t_s=100, node="node0"), Joined(t_s=200, node="node0"))
    rules = make_rules(rolls_back=None, joins_at_once=True, join_pause_s=5)
    # Four nodes are a quarter faster than three.
    for horizon_s, recoveries in ((19.0, 1), (21.0, 2)):
        outcome = play(make_trace(*events), dataclasses.replace(rules, join_horizon_s=horizon_s))
        assert len(outcome.summary.recoveries) == recoveries


def test_a_spare_takes_a_lost_nodes_place_and_without_one_the_job_restarts() -> None:
    events = (Lost(t_s=101, node="node0"), Lost(t_s=301, node="node2"))
    outcome = play(make_trace(*events), make_rules(spares=1, swap_s=20, pause_s=70))
    assert [recovery.stall_s for recovery in outcome.summary.recoveries] == [20, 70]
    assert outcome.stretches[0].samples_per_s == outcome.stretches[2].samples_per_s  # three nodes each
    swapped, restarted = outcome.summary.recoveries
    assert (swapped.action, restarted.action) == ("reinstantiate", "checkpoint")


@pytest.mark.parametrize(("spares", "training"), [(0, 4), (1, 3), (2, 2), (4, 2), (9, 2)])
def test_as_many_spares_stand_by_as_the_others_can_do_without(spares: int, training: int) -> None:
    outcome = play(make_trace(), make_rules(spares=spares, swap_s=20))
    assert outcome.stretches[-1].samples_per_s == pytest.approx(training)


def test_hot_swap_saves_for_those_losses_alone_that_no_spare_absorbs() -> None:
    job = dataclasses.replace(JOB, checkpoint_interval_s=None, costs=Costs(swap_spares=1.0, checkpoint_write_s=1.0))
    absorbed, another = Lost(t_s=301, node="node0"), Lost(t_s=601, node="node1")
    settings = PolicySettings(job=job)
    assert POLICIES["hotswap"](make_trace(absorbed), settings).summary.downtime_s["checkpoint"] == 0
    assert POLICIES["hotswap"](make_trace(absorbed, another), settings).summary.downtime_s["checkpoint"] > 0


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"decoupled-diloco"}))  # its learners' parts have other nodes
def test_nodes_that_are_never_there_write_and_read_no_checkpoint(policy: str) -> None:
    job = dataclasses.replace(JOB, costs=dataclasses.replace(JOB.costs, checkpoint_bytes_per_s=1.0))
    trace = make_trace(*(Lost(t_s=t_s, node=f"node{index}") for index, t_s in enumerate((300.0, 300.0, 500.0))))
    longer = dataclasses.replace(trace, nodes=(*trace.nodes, *(f"absent{number}" for number in range(40))))
    one, other = (POLICIES[policy](each, PolicySettings(job=job)) for each in (trace, longer))
    assert one.summary.downtime_s == other.summary.downtime_s


def test_too_few_nodes_are_idle_until_there_are_enough() -> None:
    events = (
        Lost(t_s=100, node="node0"),
        Lost(t_s=100, node="node1"),
        Lost(t_s=100, node="node2"),
        Joined(t_s=300, node="node0"),
    )
    outcome = play(make_trace(*events), make_rules())
    assert seconds_of(outcome, Activity.IDLE) == pytest.approx(200)
    assert seconds_of(outcome, Activity.RECOVERING) == pytest.approx(10)


def test_the_slowest_node_holds_up_all() -> None:
    outcome = play(make_trace(Slowed(t_s=500, node="node3", factor=2)), make_rules())
    assert outcome.samples_per_s == pytest.approx(3.0)


def test_a_crashed_process_stops_the_job_though_its_node_is_there() -> None:
    outcome = play(make_trace(WorkerCrashed(t_s=500, node="node3")), make_rules())
    assert len(outcome.summary.recoveries) == 1
    assert outcome.stretches[-1].samples_per_s == pytest.approx(4.0)


def test_neighbours_of_one_pipeline_are_adjacent_and_others_are_not() -> None:
    are_adjacent = adjacent_in_grid(2)
    used = ("a", "b", "c", "d")
    assert are_adjacent({"a", "b"}, used)
    assert not are_adjacent({"b", "c"}, used)
    assert not are_adjacent({"a"}, used)


def test_a_grid_leaves_nodes_idle_where_plans_do_not() -> None:
    # Two nodes hold the model's four layers at least, so of five nodes a grid uses four.
    job = dataclasses.replace(JOB, profile=uniform_profile(4, memory_bytes=40, seconds=0.5))
    grids, plans = Grids(job), Plans(job)
    assert grids.step_s(5) == grids.step_s(4)
    assert grids.step_s(1) is None
    assert plans.step_s(1) is None
    plan_s, grid_s = plans.step_s(5), grids.step_s(5)
    assert plan_s is not None
    assert grid_s is not None
    assert plan_s <= grid_s


def test_redundant_passes_fill_bubbles_and_what_does_not_fit_is_paid() -> None:
    profile = JOB.profile
    redundant = redundant_profile(profile)
    assert redundant.layers[0].state_bytes == 2 * profile.layers[0].state_bytes
    assert redundant.layers[0].forward_s == profile.layers[0].forward_s
    # Four stages of a layer each: a stage waits for three microbatches, in which nine forward passes fit at B = 2 F.
    roomy = dataclasses.replace(JOB, profile=uniform_profile(4, memory_bytes=800, seconds=0.5))
    layer = roomy.profile.layers[0]
    forward_s, backward_s = layer.forward_s[1], layer.backward_s[1]
    fits = int(3 * (forward_s + backward_s) / forward_s)
    grids, plain = RedundantGrids(roomy, depth=4), Grids(roomy, depth=4)
    assert grids.pipelines_s(4, 1, fits) == pytest.approx(plain.pipelines_s(4, 1, fits))
    assert grids.pipelines_s(4, 1, 10 * fits) == pytest.approx(10 * fits * (2 * forward_s + backward_s))
    assert grids.pipelines_s(4, 1, 10 * fits) > 1.2 * plain.pipelines_s(4, 1, 10 * fits)


def test_recycle_slows_by_what_its_peers_take_over_and_no_more() -> None:
    outcome = POLICIES["recycle"](make_trace(Lost(t_s=500, node="node3")), PolicySettings(job=JOB))
    before, after = outcome.stretches[0], outcome.stretches[-1]
    assert before.samples_per_s > after.samples_per_s > before.samples_per_s / 2
    assert outcome.summary.steps_lost <= 1


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_trains_all_the_time_when_nothing_happens(name: str) -> None:
    outcome = POLICIES[name](make_trace(), PolicySettings(job=JOB))
    assert outcome.policy == name
    assert outcome.summary.goodput == pytest.approx(1.0, abs=0.15)
    assert outcome.summary.elapsed_s == pytest.approx(1000)


SLOWER_BEFORE_A_LOSS = make_trace(
    Lost(t_s=0.0, node="node0"),
    Lost(t_s=0.0, node="node1"),
    Lost(t_s=31.0, node="node2"),
    Slowed(t_s=31.0, node="node3", factor=2.0),
    Lost(t_s=32.0, node="node3"),
    num_nodes=5,
)
"""What is lost was made at several speeds."""


@examples(100)
@example(trace=SLOWER_BEFORE_A_LOSS, name="bamboo")
@given(trace=traces(min_nodes=2, max_nodes=7, max_events=15), name=st.sampled_from(sorted(POLICIES)))
def test_the_time_of_any_run_is_accounted_for(trace: Trace, name: str) -> None:
    assume(max(count for _, count in trace.counts) >= 2)
    outcome = POLICIES[name](trace, PolicySettings(job=JOB))
    summary = outcome.summary
    spent_s = summary.goodput * summary.elapsed_s + sum(summary.downtime_s.values())
    assert spent_s == pytest.approx(trace.duration_s, abs=1e-3)
    assert summary.elapsed_s == pytest.approx(trace.duration_s)
    assert 0 <= summary.goodput <= 1 + 1e-9
    edges = [(each.start_s, each.stop_s) for each in outcome.stretches]
    assert all(start < stop + 1e-9 for start, stop in edges)
    assert sum(stop - start for start, stop in edges) == pytest.approx(trace.duration_s, abs=1e-3)


def test_the_help_names_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    main(["sim", "--help"])
    helped = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(POLICIES)};" in helped
