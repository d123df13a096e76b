"""Memory counts the microbatches that a pipeline itself has in flight: at most its own share of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import PlanningError, Unrecoverable
from oobleck.planner import ExecutionPlan, Pipeline, Planner, PlannerSettings, Profile, StageTemplate
from oobleck.planner.costs import stage_footprint
from oobleck.planner.profiles import Recomputed
from oobleck.planner.what_if import explain_pipelines
from oobleck.schedule import ScheduleKind
from oobleck.schedule.forecast import forecast
from oobleck.schedule.interleaving import make_cutter
from tests.examples import examples
from tests.planner.drawing import make_layer, make_profile, profiles
from tests.planner.simple_profiles import node_names
from tests.planner.test_recomputation import recomputing

# 4 layers of 40 bytes of state; each keeps 10 bytes of a microbatch, and sends 1.
FOUR_LAYERS = [make_layer(param_bytes=10, activation_bytes=10, output_bytes=1) for _ in range(4)]


def holds(profile: Profile, stops: tuple[int, ...], num_microbatches: int) -> bool:
    """Tell whether stages fit that take this many microbatches, if they recompute as much as they can."""
    stages = [
        StageTemplate(
            first_layer=first, stop_layer=stop, node_index=index, num_recomputed=blocks_in(profile, first, stop)
        )
        for index, (first, stop) in enumerate(pairwise(stops))
    ]
    return stages_hold(profile, stages, num_microbatches)


def blocks_in(profile: Profile, first: int, stop: int) -> int:
    return sum(bool(layer.recomputed) for layer in profile.layers[first:stop])


def stages_hold(profile: Profile, stages: Sequence[StageTemplate], num_microbatches: int) -> bool:
    """Tell by the definition whether stages fit that take this many microbatches under 1F1B."""
    for after, stage in enumerate(reversed(stages)):
        held = stage_footprint(profile, stage)
        in_flight = min(after + 1, num_microbatches)
        if held.static_bytes + in_flight * held.activation_bytes > profile.device.memory_bytes:
            return False
    return True


def pipeline_holds(profile: Profile, pipeline: Pipeline) -> bool:
    return stages_hold(profile, pipeline.template.stages, pipeline.num_microbatches)


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


@examples(300)
@given(
    data=st.data(),
    profile=profiles(max_layers=5) | recomputing(),
    num_nodes=st.integers(1, 7),
    num_microbatches=st.integers(1, 6),
    fault_threshold=st.integers(0, 2),
)
def test_no_plan_is_refused_that_memory_allows(
    data: st.DataObject, profile: Profile, num_nodes: int, num_microbatches: int, fault_threshold: int
) -> None:
    """Neither at the start, nor after a loss, nor where a node becomes slow."""
    settings = PlannerSettings(num_microbatches=num_microbatches, fault_threshold=fault_threshold)
    nodes = node_names(num_nodes)
    try:
        before = Planner(profile, settings).initial_plan(nodes).plan
    except PlanningError:
        assert not most_pipelines(profile, num_nodes, num_microbatches)
        return
    check(profile, before, settings, num_nodes)
    slow = {data.draw(st.sampled_from(nodes)): data.draw(st.sampled_from((1.5, 4.0)))}
    after = Planner(profile, settings).reconfigure(before, slow=slow).plan
    assert all(map(partial(pipeline_holds, profile), after.pipelines))
    lost = data.draw(st.sampled_from(before.nodes))
    try:
        after = Planner(profile, settings).reconfigure(before, lost=[lost]).plan
    except Unrecoverable:
        return
    except PlanningError:
        assert not most_pipelines(profile, num_nodes - 1, num_microbatches)
        return
    check(profile, after, settings, num_nodes - 1)


def test_stages_recompute_no_more_than_their_few_microbatches_ask_for() -> None:
    """Three in flight do not fit, whatever is recomputed, and the two that a pipeline takes fit without.

    The first of four stages of two blocks has 330 bytes left, of which each microbatch in flight takes 160, or 120 if
    all is recomputed.
    """
    block = replace(
        make_layer(6.0, param_bytes=20, activation_bytes=80, output_bytes=1),
        recomputed={
            "selective": Recomputed(more_s={1: 0.5}, activation_bytes=70, transient_bytes=0),
            "all": Recomputed(more_s={1: 2.0}, activation_bytes=60, transient_bytes=0),
        },
    )
    profile = make_profile([block] * 8, memory_bytes=490)
    plan = Planner(profile, PlannerSettings(num_microbatches=4)).initial_plan(node_names(8)).plan
    assert [(len(each.nodes), each.num_microbatches) for each in plan.pipelines] == [(4, 2), (4, 2)]
    stages = [stage for each in plan.pipelines for stage in each.template.stages]
    assert {stage.num_recomputed + stage.num_selective for stage in stages} == {0}
    assert all(map(partial(pipeline_holds, profile), plan.pipelines))


@pytest.mark.parametrize(
    ("num_layers", "activation_bytes", "memory_bytes", "num_microbatches", "fault_threshold", "factor"),
    [(3, 10, 65, 4, 1, 2.0), (3, 20, 80, 3, 0, 4.0), (4, 10, 100, 7, 1, 4.0)],
)
def test_a_slow_node_is_planned_for_where_some_nodes_alone_have_no_memory_for_their_share(
    num_layers: int,
    activation_bytes: int,
    memory_bytes: int,
    num_microbatches: int,
    fault_threshold: int,
    factor: float,
) -> None:
    """Each ended in an error of its own, as pipelines were proposed for groups of nodes that can form none."""
    layer = make_layer(param_bytes=10, activation_bytes=activation_bytes, output_bytes=1)
    profile = make_profile([layer] * num_layers, memory_bytes=memory_bytes)
    settings = PlannerSettings(num_microbatches=num_microbatches, fault_threshold=fault_threshold)
    planner = Planner(profile, settings)
    decision = planner.reconfigure(planner.initial_plan(node_names(6)).plan, slow={"node0": factor})
    check(profile, decision.plan, settings, 6)


@pytest.mark.parametrize(
    ("num_nodes", "num_layers", "activation_bytes", "memory_bytes", "num_microbatches", "slow", "joined"),
    [
        (4, 4, 10, 80, 4, {"node2": 4.0}, []),
        (4, 10, 10, 200, 5, {"node2": 2.0}, []),
        (3, 7, 5, 100, 2, {"node1": 4.0}, []),
        (3, 4, 20, 120, 5, {}, ["node3"]),
    ],
)
def test_chunks_take_no_more_microbatches_than_they_were_cut_for_where_more_have_no_memory(
    num_nodes: int,
    num_layers: int,
    activation_bytes: int,
    memory_bytes: int,
    num_microbatches: int,
    slow: dict[str, float],
    joined: list[str],
) -> None:
    """Shares that changed once made stages of several chunks larger than their devices."""
    layer = make_layer(param_bytes=5, activation_bytes=activation_bytes, output_bytes=1)
    profile = make_profile([layer] * num_layers, memory_bytes=memory_bytes)
    settings = PlannerSettings(num_microbatches=num_microbatches)
    planner = Planner(profile, settings, make_cutter=make_cutter(ScheduleKind.INTERLEAVED, 2))
    before = planner.initial_plan(node_names(num_nodes)).plan
    plan = planner.reconfigure(before, slow=slow, joined=joined).plan
    found = forecast(profile, plan, kind=ScheduleKind.INTERLEAVED)
    assert all(min(each.headroom_bytes) >= 0 for each in found.pipelines)


@examples(150)
@given(
    data=st.data(),
    profile=profiles(min_layers=4, max_layers=9),
    num_nodes=st.integers(2, 8),
    num_microbatches=st.integers(2, 16),
    kind=st.sampled_from((ScheduleKind.INTERLEAVED, None)),
)
def test_chunks_have_memory_for_the_microbatches_that_a_pipeline_has_after_every_change(
    data: st.DataObject, profile: Profile, num_nodes: int, num_microbatches: int, kind: ScheduleKind | None
) -> None:
    settings = PlannerSettings(num_microbatches=num_microbatches, fault_threshold=data.draw(st.integers(0, 1)))
    planner = Planner(profile, settings, make_cutter=make_cutter(kind, 2))
    nodes = node_names(num_nodes)
    try:
        decision = planner.initial_plan(nodes)
    except PlanningError:
        assert not most_pipelines(profile, num_nodes, num_microbatches)
        return
    for number in range(4):
        found = forecast(profile, decision.plan, kind=kind)
        assert all(min(each.headroom_bytes) >= 0 for each in found.pipelines)
        before, node = decision.plan, data.draw(st.sampled_from(decision.plan.nodes))
        nodes = [*before.nodes, *before.spares]
        change = data.draw(st.sampled_from(("lost", "slow", "joined")))
        try:
            if change == "lost":
                nodes.remove(node)
                decision = planner.reconfigure(before, lost=[node])
            elif change == "slow":
                decision = planner.reconfigure(before, slow={node: 2.0})
            else:
                nodes.append(f"joined{number}")
                decision = planner.reconfigure(before, joined=nodes[-1:])
        except Unrecoverable:
            return
        except PlanningError:
            assert not most_pipelines(profile, len(nodes), num_microbatches)
            return
