"""A planner with less memory than the one whose plan it changes: it finds a plan, or says why there is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleck.errors import PlanningError, Unrecoverable
from oobleck.planner import ExecutionPlan, NodeKind, Planner, PlannerSettings

from .simple_profiles import make_profile, node_names


def planner(memory_bytes: int) -> Planner:
    profile = make_profile([0.1] * 8, memory_bytes=memory_bytes)
    kind = NodeKind(name="kind", profile=profile, devices_per_node=1)
    return Planner([kind], PlannerSettings(num_microbatches=16, fault_threshold=1))


def largest_stage(plan: ExecutionPlan) -> int:
    return max(len(stage.layers) for pipeline in plan.pipelines for stage in pipeline.stages)


@settings(max_examples=30)
@given(
    memory=st.integers(8, 60),
    share=st.floats(0.2, 1.0),
    lost=st.sets(st.sampled_from(node_names(8)), max_size=3),
    slow=st.dictionaries(st.sampled_from(node_names(8)), st.floats(1.1, 4.0), max_size=2),
)
def test_plans_change_to_less_memory_or_say_why_not(memory, share, lost, slow):
    try:
        before = planner(memory * 10**8).initial_plan(node_names(8)).plan
    except PlanningError:
        return
    after = planner(int(share * memory * 10**8))
    slow = {node: factor for node, factor in slow.items() if node not in lost}
    rests = dict.fromkeys(range(len(before.pipelines)), (1, 0))
    assert after.rest_s(before, rests, slow=slow) > 0
    try:
        decision = after.reconfigure(before, lost=frozenset(lost), slow=slow)
    except (PlanningError, Unrecoverable):
        return
    layer = 3 * 10**8  # its weights and its optimizer's state, without gradients and activations
    assert largest_stage(decision.plan) * layer <= share * memory * 10**8


def test_small_pipelines_become_larger_ones():
    before = planner(40 * 10**8).initial_plan(node_names(8)).plan
    after = planner(20 * 10**8).reconfigure(before, lost=frozenset()).plan
    assert min(len(pipeline.nodes) for pipeline in before.pipelines) == 1
    assert min(len(pipeline.nodes) for pipeline in after.pipelines) == 2


@pytest.mark.parametrize("lost", ["node0", "node7"])
def test_the_rest_of_a_step_is_predicted_under_the_plan_of_before(lost):
    before = planner(40 * 10**8).initial_plan(node_names(8)).plan
    rests = {index: (2, 1) for index, pipeline in enumerate(before.pipelines) if lost not in pipeline.nodes}
    assert planner(20 * 10**8).rest_s(before, rests) == planner(40 * 10**8).rest_s(before, rests)
