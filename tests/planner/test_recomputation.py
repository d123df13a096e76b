"""Stages recompute as much as their memory asks for, and no more."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import PlanningError
from oobleck.plan import PipelineTemplate, StageTemplate
from oobleck.planner import NodeKind, Planner, PlannerSettings, Profile, profile_from_json, profile_to_json
from oobleck.planner.costs import StageCosts, stage_footprint
from oobleck.planner.profiles import Recomputed, stage_more_s
from oobleck.planner.templates import find_templates
from oobleck.schedule.costs_of_stages import stage_costs
from oobleck.schedule.forecast import forecast
from tests.examples import examples

from .drawing import make_layer, make_profile


@st.composite
def recomputing(draw: st.DrawFn) -> Profile:
    """Two ends and alike blocks, which keep less at each level, in memory from scarce to plenty."""
    kept = sorted(draw(st.lists(st.integers(1, 30), min_size=3, max_size=3)), reverse=True)
    some, all_of_it = sorted(draw(st.lists(st.integers(0, 12), min_size=2, max_size=2)))
    block = replace(
        make_layer(6.0, activation_bytes=kept[0]),
        recomputed={
            "selective": Recomputed(more_s={1: some / 4}, activation_bytes=kept[1], transient_bytes=0),
            "all": Recomputed(more_s={1: all_of_it / 4}, activation_bytes=kept[2], transient_bytes=0),
        },
    )
    end = make_layer(draw(st.integers(1, 9)), activation_bytes=draw(st.integers(0, 9)))
    num_blocks = draw(st.integers(1, 6))
    return make_profile([end, *[block] * num_blocks, end], memory_bytes=draw(st.integers(60, 700)))


def _ways(profile: Profile, first: int, stop: int) -> list[StageTemplate]:
    number = sum(bool(layer.recomputed) for layer in profile.layers[first:stop])
    return [
        StageTemplate(
            first_layer=first, stop_layer=stop, node_index=0, num_selective=selective, num_recomputed=recomputed
        )
        for selective in range(number + 1)
        for recomputed in range(number + 1 - selective)
    ]


def _least_s(costs: StageCosts, first: int, stop: int, in_flight: int) -> float:
    """The least seconds of all levels of all blocks."""
    fitting = []
    for stage in _ways(costs.profile, first, stop):
        held = stage_footprint(costs.profile, stage)
        if held.static_bytes + in_flight * held.activation_bytes <= costs.usable_bytes:
            fitting.append(stage_more_s(costs.profile, stage))
    return min(fitting, default=math.inf)


@examples(60)
@given(profile=recomputing(), in_flight=st.integers(1, 5))
def test_no_other_levels_that_fit_take_less_time_than_a_block(profile: Profile, in_flight: int) -> None:
    costs = StageCosts(profile, max_in_flight=8)
    chosen, most = costs.recomputing_s(1, in_flight), costs.most_in_flight(1)
    block = profile.layers[1]
    for first, stop in combinations(range(profile.num_layers + 1), 2):
        least_s = _least_s(costs, first, stop, in_flight)
        assert (most[first, stop] >= in_flight) == (least_s < math.inf)
        # Levels of which one is between the two others in one block alone are not tried.
        slack_s = max(each.more_s[1] for each in block.recomputed.values())
        assert least_s - 1e-9 <= chosen[first, stop] <= least_s + slack_s or chosen[first, stop] == least_s


@examples(40)
@given(profile=recomputing(), num_nodes=st.integers(1, 4))
def test_templates_are_the_fastest_of_all_cuts_with_what_they_recompute(profile: Profile, num_nodes: int) -> None:
    costs = StageCosts(profile, max_in_flight=8)
    found = find_templates(costs, [num_nodes]).get(num_nodes)
    best_s = math.inf
    for stops in combinations(range(1, profile.num_layers), num_nodes - 1):
        edges = (0, *stops, profile.num_layers)
        stages = (costs.stage(*ends, index, 1) for index, ends in enumerate(pairwise(edges)))
        template = PipelineTemplate(stages=tuple(stages))
        if costs.fits(template):
            best_s = min(best_s, costs.timing(template).step_s(min(8, 4 * num_nodes)))
    if found is None:
        assert best_s == math.inf
    else:
        assert costs.fits(found)
        assert costs.timing(found).step_s(min(8, 4 * num_nodes)) == pytest.approx(best_s, rel=1e-8)


@examples(40)
@given(profile=recomputing())
def test_a_plan_says_what_its_stages_recompute_and_fits(profile: Profile) -> None:
    planner = Planner(profile, PlannerSettings(num_microbatches=8, fault_threshold=0))
    nodes = [f"node{index}" for index in range(4)]
    if not planner.can_hold(nodes):
        return
    decision = planner.initial_plan(nodes)
    for each in forecast(profile, decision.plan).pipelines:
        assert min(each.headroom_bytes) >= 0
        costs = stage_costs(profile, each.template)
        for stage, cost in zip(each.template.stages, costs, strict=True):
            assert cost.backward_s == pytest.approx(
                sum(profile.layers[layer].backward_s[1] for layer in stage.layers) + stage_more_s(profile, stage)
            )
    lost = decision.plan.pipelines[-1].nodes[-1]
    if not planner.can_hold([node for node in nodes if node != lost]) or len(decision.plan.pipelines) < 2:
        return
    after = planner.reconfigure(decision.plan, lost=[lost])
    assert min(min(each.headroom_bytes) for each in forecast(profile, after.plan).pipelines) >= 0


def test_a_profile_keeps_its_levels_in_a_file() -> None:
    block = replace(
        make_layer(),
        recomputed={level: Recomputed(more_s={1: 1.0}, activation_bytes=1) for level in ("selective", "all")},
    )
    profile = make_profile([make_layer(), block, make_layer()])
    assert profile_from_json(profile_to_json(profile)) == profile


def test_kinds_of_nodes_do_not_choose() -> None:
    block = replace(
        make_layer(),
        recomputed={level: Recomputed(more_s={1: 1.0}, activation_bytes=1) for level in ("selective", "all")},
    )
    kinds = [NodeKind(name=name, profile=make_profile([block, block])) for name in ("a", "b")]
    with pytest.raises(PlanningError, match="recompute is auto"):
        Planner(kinds, PlannerSettings(num_microbatches=4), {"x": "a", "y": "b"})
