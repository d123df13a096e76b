"""Nodes that become slow, in both modes: they get less to do, rest, and get another chance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.journal import JournalEntry, PaceChanged, PlanAdopted, PlanCause, RecoveryDone, StepDone, StepsDone
from oobleck.control.journal.summary import summarize
from oobleck.sim.cluster.run import ClusterRun
from oobleck.sim.sweep.settings import SweepSettings
from oobleck.sim.sweep.sweep import sweep
from oobleck.sim.trace import Lost, MasterCrashed, Slowed, Trace, TraceEvent
from tests.sim.test_modes import plans
from tests.sim.virtual import Setting

LONG = Setting(slowness=5.0, duration_s=300.0)
"""Steps take 1.2 s, and 1.8 s on three nodes: a slow one is found out in 11 s, and tried again 20 times as late."""
SLOW = Slowed(t_s=10.0, node="n1", factor=3.0)
WELL = Slowed(t_s=40.0, node="n1", factor=1.0)


def run(*events: TraceEvent, setting: Setting = LONG) -> ClusterRun:
    """A run in the cluster mode."""
    played = replace(setting, events=events).run()
    assert played.end.exit_code == 0, played.end.reason
    assert (played.summary.steps_lost, played.summary.samples_repeated, played.summary.samples_missing) == (0, 0, 0)
    return played


def play(*events: TraceEvent, setting: Setting = LONG, duration_s: float = LONG.duration_s) -> tuple[JournalEntry, ...]:
    """The same in the sweep mode."""
    settings = SweepSettings(
        profile=setting.profile,
        global_batch_size=setting.job.global_batch_size,
        fault_threshold=setting.job.fault_threshold,
        num_pipelines=setting.num_pipelines,
    )
    nodes = tuple(f"n{index}" for index in range(setting.num_nodes))
    return sweep(Trace(duration_s=duration_s, nodes=nodes, start=nodes, events=events), settings)


def recoveries(entries: tuple[JournalEntry, ...]) -> list[tuple[PlanCause, tuple[str, ...]]]:
    return [(entry.cause, entry.nodes) for entry in entries if isinstance(entry, RecoveryDone)]


def newest_plan(entries: tuple[JournalEntry, ...]) -> PlanAdopted:
    return [entry for entry in entries if isinstance(entry, PlanAdopted)][-1]


@pytest.fixture(scope="module")
def passing() -> tuple[JournalEntry, ...]:
    """A run in which a slow-down passes."""
    return run(SLOW, WELL).entries


def test_a_slow_node_rests_and_is_taken_back_once_it_is_well(passing: tuple[JournalEntry, ...]):
    assert recoveries(passing) == [(PlanCause.SLOW, ("n1",)), (PlanCause.RETRIED, ("n1",))]
    assert "n1" in newest_plan(passing).plan.nodes
    steps = [entry.record.duration_s for entry in passing if isinstance(entry, StepDone)]
    assert steps[-1] == pytest.approx(steps[1], rel=0.01)


def test_the_first_step_of_a_node_that_has_rested_is_not_as_long_as_its_rest(passing: tuple[JournalEntry, ...]):
    assert max(entry.record.duration_s for entry in passing if isinstance(entry, StepDone)) < 5.0


def test_a_new_master_knows_who_rests_for_being_slow_and_tries_them_too():
    played = run(SLOW, WELL, MasterCrashed(t_s=50.0, down_s=1.0), setting=replace(LONG, duration_s=350.0))
    assert recoveries(played.entries) == [(PlanCause.SLOW, ("n1",)), (PlanCause.RETRIED, ("n1",))]
    assert "n1" in newest_plan(played.entries).plan.nodes


def test_a_slow_node_that_is_tried_too_early_rests_twice_as_long():
    journal = play(SLOW, duration_s=1000.0)
    done = [entry for entry in journal if isinstance(entry, RecoveryDone)]
    assert [entry.cause for entry in done] == [
        PlanCause.SLOW,
        PlanCause.RETRIED,
        PlanCause.SLOW,
        PlanCause.RETRIED,
        PlanCause.SLOW,
    ]
    first_s, second_s = (retried.began_s - slow.t_s for slow, retried in zip(done[::2], done[1::2], strict=False))
    assert second_s == pytest.approx(2 * first_s, rel=0.02)
    assert newest_plan(journal).plan.spares == ("n1",)


def test_nodes_that_become_slow_together_are_all_found():
    events = tuple(Slowed(t_s=100.0, node=node, factor=factor) for node, factor in (("n0", 4.0), ("n2", 3.0)))
    setting = replace(LONG, num_nodes=7)
    journal = play(*events, setting=setting)
    found = {(entry.node, entry.factor) for entry in journal if isinstance(entry, PaceChanged) and entry.t_s < 150.0}
    assert found == {("n0", 4.0), ("n2", 3.0)}


def test_tries_cost_little():
    gone = summarize(play(Lost(t_s=10.0, node="n1"), duration_s=86_400.0))
    assert summarize(play(SLOW, duration_s=86_400.0)).steps_committed > 0.99 * gone.steps_committed


def test_a_slow_node_that_is_lost_while_it_rests_is_not_tried():
    assert recoveries(play(SLOW, Lost(t_s=60.0, node="n1"), duration_s=1000.0)) == [(PlanCause.SLOW, ("n1",))]


def test_a_slow_down_that_passes_costs_what_it_takes_to_find_out_and_to_rest():
    usual_s = next(entry.record.duration_s for entry in play() if isinstance(entry, StepsDone))
    journal = play(SLOW, WELL, duration_s=2000.0)
    assert summarize(journal).steps_committed > (2000.0 - 120.0) / usual_s


@pytest.mark.parametrize("layers_per_device", [4, 2])
@pytest.mark.parametrize("events", [(SLOW,), (SLOW, WELL)])
def test_both_modes_plan_alike_for_slow_nodes(layers_per_device: int, events: tuple[TraceEvent, ...]):
    setting = replace(LONG, layers_per_device=layers_per_device)
    played, journal = run(*events, setting=setting).entries, play(*events, setting=setting)
    assert plans(journal) == plans(played)
    assert recoveries(journal) == recoveries(played)
    assert len(plans(journal)) > 1


DEEP = replace(LONG, num_layers=16, layers_per_device=100, slowness=1.0, num_pipelines=1, fault_threshold=0)
"""One pipeline of four nodes with four layers each: a node less costs more than fewer layers on a slow one."""
TWO_DEEP = replace(DEEP, num_layers=24, num_nodes=8, num_pipelines=2, fault_threshold=1, duration_s=90.0)
HALF = Slowed(t_s=10.0, node="n1", factor=2.0)


def stages(adopted: PlanAdopted) -> list[tuple[int, ...]]:
    """How many layers the stages of each pipeline have."""
    return [tuple(len(stage.layers) for stage in pipeline.stages) for pipeline in adopted.plan.pipelines]


def durations(entries: tuple[JournalEntry, ...], *, since_s: float, until_s: float) -> list[float]:
    return [
        entry.record.duration_s for entry in entries if isinstance(entry, StepDone) and since_s < entry.t_s < until_s
    ]


def test_stages_are_cut_again_for_a_slow_node_and_steps_become_as_short_as_predicted():
    played = run(HALF, replace(HALF, t_s=60.0, factor=1.0), setting=replace(DEEP, duration_s=120.0))
    before, cut, after = (entry for entry in played.entries if isinstance(entry, PlanAdopted))
    assert [stages(plan) for plan in (before, cut, after)] == [[(4, 4, 4, 4)], [(5, 5, 2, 4)], [(4, 4, 4, 4)]]
    (pipeline,) = cut.plan.pipelines
    assert pipeline.nodes.index("n1") == 2
    assert recoveries(played.entries) == [(PlanCause.SLOW, ("n1",)), (PlanCause.SLOW, ("n1",))]
    slow_s = durations(played.entries, since_s=14.0, until_s=cut.t_s)[-1]
    cut_s = durations(played.entries, since_s=cut.t_s + 4.0, until_s=60.0)
    assert min(cut_s) == pytest.approx(max(cut_s), rel=0.01)
    # Goodput rises as predicted: 39 % more steps in a second.
    assert cut_s[0] == pytest.approx(cut.predicted_step_s, rel=0.01)
    assert slow_s / cut_s[0] == pytest.approx(1.386, rel=0.01)
    usual_s = durations(played.entries, since_s=5.0, until_s=10.0)[-1]
    assert durations(played.entries, since_s=after.t_s + 4.0, until_s=120.0)[0] == pytest.approx(usual_s, rel=0.01)


def test_a_run_survives_whatever_comes_after_its_stages_were_cut_again():
    """A slow node that is lost, a neighbour that is, and a master that is not there for a while."""
    events = (replace(HALF, factor=1.6), MasterCrashed(t_s=45.0, down_s=1.0))
    for lost in ("n0", "n1", "n7"):
        played = run(*events, Lost(t_s=60.0, node=lost), setting=TWO_DEEP)
        plans_of = [entry for entry in played.entries if isinstance(entry, PlanAdopted)]
        assert stages(plans_of[1]) == [(6, 5, 5, 4, 4), (12, 4, 8)]
        assert plans_of[1].plan.pipelines[1].nodes.index("n1") == 1
        assert lost not in plans_of[-1].plan.nodes
        for plan in plans_of:
            assert all(sum(lengths) == 24 for lengths in stages(plan))
        assert [cause for cause, _ in recoveries(played.entries)][-1] is PlanCause.LOSS


@pytest.mark.parametrize(
    "later", [Lost(t_s=60.0, node="n6"), Lost(t_s=60.0, node="n1"), replace(HALF, t_s=60.0, factor=1.0)]
)
def test_both_modes_cut_stages_again_alike(later: TraceEvent):
    setting, events = replace(TWO_DEEP, duration_s=110.0), (replace(HALF, factor=1.6), later)
    played, journal = run(*events, setting=setting).entries, play(*events, setting=setting, duration_s=110.0)
    assert plans(journal) == plans(played)
    assert recoveries(journal) == recoveries(played)
    assert len(plans(journal)) > 2
