"""The plan whose event-exact step is the shortest. tools/bench/fastest_plan.py compares with all plans there are."""

from __future__ import annotations

import random

import pytest

from oobleck.planner import ExecutionPlan, PipelineTemplate, Planner, PlannerSettings, Profile
from oobleck.schedule.forecast import forecast
from tests.planner.drawing import make_layer, make_network, make_profile, uniform_profile
from tools.bench.fastest_plan import Case, best_s, draw_case


def talkative_profile(seed: int = 4, num_layers: int = 9) -> Profile:
    """Layers whose messages take about as long as their passes."""
    draw = random.Random(seed)
    return make_profile(
        [make_layer(draw.uniform(1, 5), output_bytes=draw.randint(0, 200)) for _ in range(num_layers)],
        network=make_network(),
    )


def names(count: int) -> list[str]:
    return [f"node{number:02d}" for number in range(count)]


def cuts(plan: ExecutionPlan) -> list[PipelineTemplate]:
    return [pipeline.template for pipeline in plan.pipelines]


@pytest.mark.parametrize("seed", [34, 57, 67, 87, 103, 112, 117, 122])
def test_no_other_plan_is_faster_by_more_than_one_percent(seed: int) -> None:
    case = draw_case(seed)
    assert isinstance(case, Case)
    assert forecast(case.profile, case.plan).step_s <= 1.01 * best_s(case)


def test_a_pipeline_is_cut_for_its_microbatches_and_stays_so_after_losses() -> None:
    profile, settings = talkative_profile(), PlannerSettings(num_microbatches=24, num_pipelines=3)
    planner = Planner(profile, settings)
    plan = planner.initial_plan(names(12)).plan
    usual = planner.templates(12)[4]
    assert all(template != usual for template in cuts(plan)), "cut again"
    lost = plan.pipelines[1].nodes[2]
    after = planner.reconfigure(plan, lost=[lost])
    untouched = [pipeline for pipeline in after.plan.pipelines if len(pipeline.nodes) == 4]
    assert [pipeline.template for pipeline in untouched] == [plan.pipelines[0].template] * 2
    # In a spare's hands the place that was lost is filled, and nothing else moves.
    filled = planner.reconfigure(plan, lost=[lost], joined=["new"])
    assert cuts(filled.plan) == cuts(plan)
    assert {transfer.target.node for transfer in filled.transfers} == {"new"}
    # A planner that has never seen the plan decides alike.
    assert Planner(profile, settings).reconfigure(plan, lost=[lost], joined=["new"]) == filled


def test_cuts_for_another_profile_are_given_up() -> None:
    settings = PlannerSettings(num_microbatches=24, num_pipelines=3)
    plan = Planner(talkative_profile(), settings).initial_plan(names(12)).plan
    other = Planner(uniform_profile(9), settings)
    after = other.reconfigure(plan, lost=[plan.pipelines[0].nodes[0]])
    assert set(cuts(after.plan)) <= set(other.templates(12).values())


def test_where_bounds_are_exact_enough_templates_stay_as_they_are() -> None:
    planner = Planner(uniform_profile(12), PlannerSettings(num_microbatches=32))
    templates = planner.templates(12)
    assert all(template is templates[template.num_nodes] for template in cuts(planner.initial_plan(names(12)).plan))


def test_memory_is_kept_to() -> None:
    for seed in range(40):
        case = draw_case(seed)
        if case is not None:
            headroom = [each.headroom_bytes for each in forecast(case.profile, case.plan).pipelines]
            assert min(min(each) for each in headroom) >= 0
