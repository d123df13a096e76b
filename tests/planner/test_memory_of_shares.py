"""Memory counts the microbatches that a pipeline itself has in flight: at most its own share of a step."""

from __future__ import annotations

import math
from functools import partial
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import PlanningError, Unrecoverable
from oobleck.planner import ExecutionPlan, Pipeline, Planner, PlannerSettings, Profile
from oobleck.planner.costs import footprint
from oobleck.planner.what_if import explain_pipelines
from tests.examples import examples
from tests.planner.drawing import make_layer, make_profile, profiles
from tests.planner.simple_profiles import node_names

# 4 layers of 40 bytes of state; each keeps 10 bytes of a microbatch, and sends 1.
FOUR_LAYERS = [make_layer(param_bytes=10, activation_bytes=10, output_bytes=1) for _ in range(4)]


def holds(profile: Profile, stops: tuple[int, ...], num_microbatches: int) -> bool:
    """Tell by the definition whether stages fit that take this many microbatches under 1F1B."""
    for after, (first, stop) in enumerate(reversed(list(pairwise(stops)))):
        held = footprint(profile, first, stop, num_devices=1)
        in_flight = min(after + 1, num_microbatches)
        if held.static_bytes + in_flight * held.activation_bytes > profile.device.memory_bytes:
            return False
    return True


def pipeline_holds(profile: Profile, pipeline: Pipeline) -> bool:
    stops = (0, *(stage.stop_layer for stage in pipeline.template.stages))
    return holds(profile, stops, pipeline.num_microbatches)


def fewest_nodes(profile: Profile, num_microbatches: int) -> int:
    """Return the fewest nodes of a pipeline that takes that many microbatches; more than there are layers for none."""
    size = profile.num_layers
    for number in range(1, size + 1):
        for inner in combinations(range(1, size), number - 1):
            if holds(profile, (0, *inner, size), num_microbatches):
                return number
    return 10**6


def most_pipelines(profile: Profile, num_nodes: int, num_microbatches: int) -> int:
    """Return the most pipelines that take a step's microbatches on these nodes, 0 for none."""
    needed = [0, *(fewest_nodes(profile, share) for share in range(1, num_microbatches + 1))]

    def most(left: int, nodes: int) -> float:
        if not left:
            return 0
        shares = [share for share in range(1, left + 1) if needed[share] <= nodes]
        return max((most(left - share, nodes - needed[share]) + 1 for share in shares), default=-math.inf)

    return int(max(0, most(num_microbatches, num_nodes)))


def has_few_microbatches(settings: PlannerSettings, num_nodes: int) -> bool:
    """Tell whether pipelines with fewer microbatches than stages count: not each node has a microbatch of a step."""
    return settings.num_microbatches < num_nodes


def check(profile: Profile, plan: ExecutionPlan, settings: PlannerSettings, num_nodes: int) -> None:
    assert plan.num_microbatches == settings.num_microbatches
    assert all(map(partial(pipeline_holds, profile), plan.pipelines))
    if has_few_microbatches(settings, num_nodes):
        most = most_pipelines(profile, num_nodes, settings.num_microbatches)
        assert len(plan.pipelines) >= min(settings.fault_threshold + 1, most)


def test_a_fixed_batch_may_be_spread_over_pipelines_with_more_stages_than_microbatches() -> None:
    """Two microbatches in flight take 60 of 65 bytes of the first stage; three would take 70."""
    profile = make_profile(FOUR_LAYERS, memory_bytes=65)
    for num_microbatches, sizes in ((2, [4, 4]), (4, [4, 4])):
        plan = Planner(profile, PlannerSettings(num_microbatches=num_microbatches)).initial_plan(node_names(8)).plan
        assert [len(pipeline.nodes) for pipeline in plan.pipelines] == sizes
        assert plan.num_microbatches == num_microbatches


def test_more_microbatches_than_the_nodes_can_hold_are_refused_with_what_helps() -> None:
    profile = make_profile(FOUR_LAYERS, memory_bytes=65)
    planner = Planner(profile, PlannerSettings(num_microbatches=5))
    with pytest.raises(PlanningError, match=r"a pipeline of 4 nodes has memory for 2 of a step's 5 .* add nodes"):
        planner.initial_plan(node_names(8))


def test_plans_of_few_microbatches_are_explained() -> None:
    profile = make_profile(FOUR_LAYERS, memory_bytes=65)
    planner = Planner(profile, PlannerSettings(num_microbatches=4))
    decision = planner.initial_plan(node_names(8))
    assert explain_pipelines(planner, node_names(8), decision) == (
        "2 pipelines: 1 would have no memory for 4 microbatches; 3 are not possible (the model needs 4 nodes, so there "
        "is room for 2 in 8)"
    )
    assert sorted(planner.templates(8)) == [4]
    assert planner.template_step_s(4, 2) == pytest.approx(decision.predicted_step_s, rel=0.05)


def test_a_step_is_not_finished_by_a_pipeline_that_has_no_memory_for_the_others() -> None:
    profile = make_profile(FOUR_LAYERS, memory_bytes=65)
    planner = Planner(profile, PlannerSettings(num_microbatches=6))
    plan = planner.initial_plan(node_names(12)).plan
    assert [pipeline.num_microbatches for pipeline in plan.pipelines] == [2, 2, 2]
    assert math.isfinite(planner.rest_s(plan, {0: (2, 2)}))
    assert planner.rest_s(plan, {0: (2, 4)}) == math.inf


@examples(200)
@given(
    data=st.data(),
    profile=profiles(max_layers=5),
    num_nodes=st.integers(1, 7),
    num_microbatches=st.integers(1, 6),
    fault_threshold=st.integers(0, 2),
)
def test_no_plan_is_refused_that_memory_allows(
    data: st.DataObject, profile: Profile, num_nodes: int, num_microbatches: int, fault_threshold: int
) -> None:
    settings = PlannerSettings(num_microbatches=num_microbatches, fault_threshold=fault_threshold)
    nodes = node_names(num_nodes)
    try:
        before = Planner(profile, settings).initial_plan(nodes).plan
    except PlanningError:
        assert not most_pipelines(profile, num_nodes, num_microbatches)
        return
    check(profile, before, settings, num_nodes)
    lost = data.draw(st.sampled_from(before.nodes))
    try:
        after = Planner(profile, settings).reconfigure(before, lost=[lost]).plan
    except Unrecoverable:
        return
    except PlanningError:
        assert not most_pipelines(profile, num_nodes - 1, num_microbatches)
        return
    check(profile, after, settings, num_nodes - 1)
