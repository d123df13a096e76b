from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence

from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.planner import ExecutionPlan, Pipeline, Planner, PlannerSettings, Profile
from oobleck.planner.instantiation.sizes import reduction_s
from oobleck.planner.one_kind import OneKindCatalog
from oobleck.planner.reconfiguration.gather import gather_slow_nodes
from tests.examples import examples
from tests.planner.drawing import make_layer, make_network, make_profile, profiles, uniform_profile

FOREVER_S = 1e12
"""A time to the next failure that repays any transition."""


def names(count: int) -> list[str]:
    return [f"node{index}" for index in range(count)]


def timing(profile: Profile, pipeline: Pipeline, slow: Mapping[str, float]) -> tuple[float, float]:
    """The seconds of a first and of each further microbatch on one device a stage, from the profile alone."""
    seconds = []
    for stage in pipeline.stages:
        layers = [profile.layers[layer] for layer in stage.layers]
        compute_s = sum(layer.forward_s[1] + layer.backward_s[1] for layer in layers)
        first, last = stage.layers[0], stage.layers[-1]
        sent = [profile.layers[first - 1].output_bytes] if first else []
        sent += [layers[-1].output_bytes] if last + 1 < profile.num_layers else []
        network = profile.network
        sends_s = sum(network.inter_node_latency_s + size / network.inter_node_bytes_per_s for size in sent)
        seconds.append(compute_s * slow.get(stage.worker_ids[0].node, 1.0) + sends_s)
    return sum(seconds), max(seconds)


def best_division_s(planner: Planner, plan: ExecutionPlan, slow: Mapping[str, float]) -> float:
    """The shortest step over all divisions of the batch among a plan's pipelines, reduction included."""
    profile, catalog = planner.profile, OneKindCatalog(planner.profile, planner.settings)
    timings = [timing(profile, pipeline, slow) for pipeline in plan.pipelines]
    most_of = [catalog.costs.most_microbatches(catalog.form_of(pipeline)) for pipeline in plan.pipelines]
    spread = range(1, plan.num_microbatches - len(timings) + 2)
    slowest_s = min(
        max(first_s + (count - 1) * next_s for (first_s, next_s), count in zip(timings, counts, strict=True))
        for counts in itertools.product(spread, repeat=len(timings))
        if sum(counts) == plan.num_microbatches and all(map(operator.le, counts, most_of))
    )
    most = max(
        sum(profile.layers[layer].param_bytes for layer in stage.layers)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    )
    return slowest_s + reduction_s(profile.network, most, len(timings))


@examples(60)
@given(data=st.data(), profile=profiles(min_layers=3, max_layers=6), num_microbatches=st.integers(4, 9))
def test_no_other_division_of_the_batch_is_faster(data: st.DataObject, profile: Profile, num_microbatches: int) -> None:
    nodes = names(data.draw(st.integers(3, 7), label="nodes"))
    planner = Planner(profile, PlannerSettings(num_microbatches=num_microbatches))
    assume(planner.can_hold(nodes))
    plan = planner.initial_plan(nodes).plan
    assume(len(plan.pipelines) <= 4)
    slow = data.draw(st.dictionaries(st.sampled_from(nodes), st.sampled_from((1.25, 2.0, 3.0, 8.0))), label="slow")
    decision = planner.reconfigure(plan, slow=slow)
    assume(len(decision.plan.pipelines) <= 4)
    templates = planner.templates(len(nodes))
    if all(each.template == templates.get(len(each.nodes)) for each in decision.plan.pipelines):
        # The prediction is their bound, or a shorter one of other pipelines that are truly no faster.
        assert decision.predicted_step_s <= best_division_s(planner, decision.plan, slow) * (1 + 1e-9)
    own_s = OneKindCatalog(profile, planner.settings).exact_step_s(decision.plan, {n: 1 / x for n, x in slow.items()})
    assert own_s is not None
    assert own_s <= decision.predicted_step_s * (1 + 1e-9)
    if [(each.nodes, each.template) for each in decision.plan.pipelines] == [
        (each.nodes, each.template) for each in plan.pipelines
    ]:
        assert decision.transfers == (), "microbatches alone move no state"


@examples(60)
@given(data=st.data(), profile=profiles(min_layers=4, max_layers=8), num_microbatches=st.integers(4, 24))
def test_no_decision_is_slower_than_staying_or_than_leaving_the_slowest_out(
    data: st.DataObject, profile: Profile, num_microbatches: int
) -> None:
    nodes = names(data.draw(st.integers(3, 9), label="nodes"))
    asked = PlannerSettings(num_microbatches=num_microbatches, mean_time_to_failure_s=FOREVER_S)
    planner = Planner(profile, asked)
    assume(planner.can_hold(nodes))
    plan = planner.initial_plan(nodes).plan
    slow = data.draw(st.dictionaries(st.sampled_from(nodes), st.sampled_from((1.25, 2.0, 8.0))), label="slow")
    decision = planner.reconfigure(plan, slow=slow)
    catalog, speeds = OneKindCatalog(profile, asked), {node: 1 / factor for node, factor in slow.items()}
    same = [(catalog.form_of(pipeline), pipeline.nodes) for pipeline in plan.pipelines]
    own_s = catalog.exact_step_s(decision.plan, speeds)
    stay_s = catalog.exact_step_s(catalog.build_plan(same, (), speeds)[0], speeds)
    assert own_s is not None
    assert stay_s is not None
    assert own_s <= 1.0101 * stay_s
    normal = [node for node in nodes if slow.get(node, 1.0) == 1.0]
    if normal and planner.can_hold(normal):
        fresh = planner.initial_plan(normal)
        if len(fresh.plan.pipelines) >= len(decision.plan.pipelines):
            assert decision.predicted_step_s <= fresh.predicted_step_s * (1 + 1e-6)


def groupings(nodes: Sequence[str], sizes: Sequence[int]) -> Iterator[list[tuple[int, tuple[str, ...]]]]:
    """All ways to give nodes to pipelines of the given sizes; the rest are spares."""
    if not sizes:
        yield []
        return
    for chosen in itertools.combinations(nodes, sizes[0]):
        left = [node for node in nodes if node not in chosen]
        for others in groupings(left, sizes[1:]):
            yield [(sizes[0], chosen), *others]


@examples(25)
@given(
    slow=st.sets(st.sampled_from(names(6)), min_size=1, max_size=3),
    factor=st.sampled_from((1.5, 2.0, 5.0)),
    num_microbatches=st.sampled_from((12, 25)),
)
def test_no_grouping_of_the_nodes_is_faster_when_stages_are_equal(
    slow: set[str], factor: float, num_microbatches: int
) -> None:
    # Equal stages without any communication: only who is with whom, and in what sizes, counts.
    profile = make_profile([make_layer(3.0) for _ in range(12)], network=make_network(latency_s=0.0, inter=1e12))
    asked = PlannerSettings(
        num_microbatches=num_microbatches, num_pipelines=2, mean_time_to_failure_s=FOREVER_S, fault_threshold=1
    )
    planner, catalog = Planner(profile, asked), OneKindCatalog(profile, asked)
    decision = planner.reconfigure(planner.initial_plan(names(6)).plan, slow=dict.fromkeys(slow, factor))
    speeds = dict.fromkeys(slow, 1 / factor)
    best_s = min(
        catalog.build_plan([(catalog.form((size,), (6,)), nodes) for size, nodes in grouping], (), speeds)[1]
        for sizes in ((3, 3), (4, 2), (5, 1), (3, 2), (4, 1), (2, 2), (3, 1), (2, 1), (1, 1))
        for grouping in groupings(names(6), sizes)
    )
    assert decision.predicted_step_s <= best_s * 1.03


def test_slow_nodes_of_two_pipelines_come_together_where_that_moves_nothing() -> None:
    planner = Planner(uniform_profile(4), PlannerSettings(num_microbatches=24, num_pipelines=3, fault_threshold=0))
    plan = planner.initial_plan(names(6)).plan
    assert [pipeline.nodes for pipeline in plan.pipelines] == [
        ("node0", "node1"),
        ("node2", "node3"),
        ("node4", "node5"),
    ]
    decision = planner.reconfigure(plan, slow={"node1": 1.5, "node2": 1.5})
    assert any({"node1", "node2"} <= set(pipeline.nodes) for pipeline in decision.plan.pipelines)
    catalog = OneKindCatalog(planner.profile, planner.settings)
    same = [(catalog.form_of(pipeline), pipeline.nodes) for pipeline in plan.pipelines]
    assert decision.predicted_step_s < catalog.build_plan(same, (), {"node1": 1 / 1.5, "node2": 1 / 1.5})[1]


def test_gathering_swaps_equal_positions_first() -> None:
    low, high = (frozenset({0}),), (frozenset({1}),)
    needed = [(low, high), (low, high), (low, high)]
    pipelines = [("a0", "a1"), ("b0", "b1"), ("c0", "c1")]
    holdings = {node: (low, high)[int(node[1])] for nodes in pipelines for node in nodes}
    # Pipeline a has most slow nodes once b1 comes; a1 goes where b1 was, and nothing moves.
    gathered = list(gather_slow_nodes(pipelines, needed, {"a0", "b1"}, holdings, (10, 10)))
    assert gathered == [[("a0", "b1"), ("b0", "a1"), ("c0", "c1")]]
    assert not list(gather_slow_nodes(pipelines, needed, {"a0", "a1"}, holdings, (10, 10)))


def test_too_many_slow_nodes_stay_where_they_are() -> None:
    layer = (frozenset({0}),)
    pipelines = [(f"a{number}", f"b{number}") for number in range(100)]
    slow = {nodes[0] for nodes in pipelines}
    holdings = {node: layer for nodes in pipelines for node in nodes}
    assert not list(gather_slow_nodes(pipelines, [(layer, layer)] * 100, slow, holdings, (1,)))
