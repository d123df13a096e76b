"""A slow node gets the place in its pipeline where it slows the step least, at the start as well."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.errors import PlanningError
from oobleck.plan import PipelineTemplate, StageTemplate
from oobleck.planner import Planner, PlannerSettings, Profile, device_sheet, estimate_profile, model_shape
from oobleck.planner.costs import StageCosts, Timing
from oobleck.planner.instantiation import distribute_microbatches
from oobleck.planner.inventory import needed_holdings
from oobleck.planner.makespan import PassTimes
from oobleck.planner.one_kind import OneKindCatalog
from oobleck.planner.templates import cut_for_speeds, order_for_speeds
from tests.examples import examples
from tests.planner.drawing import make_layer, make_network, make_profile
from tests.planner.test_cut_for_slow_nodes import FOREVER_S, all_cuts, is_sound, names


@st.composite
def tight_profiles(draw: st.DrawFn, *, max_layers: int = 7) -> Profile:
    """Stages hold from one layer to all of them; messages and reductions take no time."""
    layers = [
        make_layer(
            draw(st.integers(1, 9)), param_bytes=draw(st.integers(1, 9)), activation_bytes=draw(st.integers(0, 9))
        )
        for _ in range(draw(st.integers(2, max_layers)))
    ]
    least = max(4 * layer.param_bytes + layer.activation_bytes for layer in layers)
    memory_bytes = least * draw(st.sampled_from((1, 2, 3, 5, 100)))
    return make_profile(layers, memory_bytes=memory_bytes, network=make_network(inter=1e12, latency_s=0.0))


def some_template(size: int, num_layers: int) -> PipelineTemplate:
    stops = [*range(size), num_layers]
    return PipelineTemplate(
        stages=tuple(
            StageTemplate(first_layer=first, stop_layer=stop, node_index=index)
            for index, (first, stop) in enumerate(itertools.pairwise(stops))
        )
    )


@examples(150)
@given(data=st.data(), profile=tight_profiles(), num_microbatches=st.integers(1, 24))
def test_no_other_order_and_cut_has_a_shorter_step(
    data: st.DataObject, profile: Profile, num_microbatches: int
) -> None:
    costs = StageCosts(profile, max_in_flight=num_microbatches)
    size = data.draw(st.integers(2, min(4, profile.num_layers)))
    speeds = data.draw(st.lists(st.sampled_from((1.0, 1.0, 0.8, 0.5, 0.2)), min_size=size, max_size=size))
    template = some_template(size, profile.num_layers)
    order = order_for_speeds([costs] * size, template, speeds, num_microbatches)
    cuts = [each for each in all_cuts(template) if costs.fits(each)]
    assert (order is None) == (not cuts)
    if order is None:
        return
    assert sorted(order) == list(range(size))
    best_s = min(
        costs.timing(cut, other).step_s(num_microbatches)
        for cut in cuts
        for other in set(itertools.permutations(speeds))
    )
    placed = [speeds[place] for place in order]
    found = cut_for_speeds([costs] * size, template, placed, needed_holdings(template, 1), num_microbatches)
    assert costs.timing(found, placed).step_s(num_microbatches) == pytest.approx(best_s, rel=3e-6)


def test_many_different_speeds_are_ordered_nearly_as_well() -> None:
    """Nine speeds are too many for all orders; slow nodes still go where memory leaves few layers."""
    layers = [make_layer(1.0, activation_bytes=10)] * 27
    costs = StageCosts(make_profile(layers, memory_bytes=700, network=make_network(latency_s=0.0)), max_in_flight=64)
    speeds = [1.0 - 0.07 * index for index in range(9)]
    template = some_template(9, 27)
    order = order_for_speeds([costs] * 9, template, speeds, 64)
    assert order is not None
    assert sorted(order) == list(range(9))
    placed = [speeds[place] for place in order]

    def best_s(speeds: Sequence[float]) -> float:
        cut = cut_for_speeds([costs] * 9, template, speeds, needed_holdings(template, 1), 64)
        return costs.timing(cut, speeds).step_s(64)

    assert best_s(placed) <= min(best_s(speeds), best_s(speeds[::-1]))


class AllPlans:
    """The shortest step over every grouping, order and cut, where one of the nodes is slow."""

    def __init__(self, profile: Profile, num_microbatches: int, factor: float) -> None:
        self._costs = StageCosts(profile, max_in_flight=num_microbatches)
        self._num_microbatches, self._factor = num_microbatches, factor

    def step_s(self, num_nodes: int, fewest: int) -> float:
        sizes = range(1, num_nodes + 1)
        normal = {size: self._timings(size, [(1.0,) * size]) for size in sizes}
        places = {size: [_slow_at(place, size, self._factor) for place in range(size)] for size in sizes}
        slowed = {size: self._timings(size, places[size]) for size in sizes}
        shortest: dict[int, float] = {}
        for size in (0, *sizes):  # that of the pipeline with the slow node, 0 if it is left out
            for others in _parts(num_nodes - max(size, 1), num_nodes):
                groups = [*([slowed[size]] if size else []), *(normal[other] for other in others)]
                if 1 <= len(groups) <= self._num_microbatches:
                    for timings in itertools.product(*groups):
                        counts = distribute_microbatches(timings, self._num_microbatches)
                        step_s = max(own.step_s(count) for own, count in zip(timings, counts, strict=True))
                        shortest[len(groups)] = min(step_s, shortest.get(len(groups), step_s))
        return min(step_s for number, step_s in shortest.items() if number >= min(fewest, max(shortest)))

    def _timings(self, size: int, speeds: Sequence[Sequence[float]]) -> list[Timing]:
        if size > self._costs.num_layers:
            return []
        cuts = [each for each in all_cuts(some_template(size, self._costs.num_layers)) if self._costs.fits(each)]
        found = {self._costs.timing(cut, each) for cut in cuts for each in speeds}
        return [
            own
            for own in found
            if not any(other != own and other.first_s <= own.first_s and other.next_s <= own.next_s for other in found)
        ]


def _slow_at(place: int, size: int, factor: float) -> tuple[float, ...]:
    return tuple(1 / factor if index == place else 1.0 for index in range(size))


def _parts(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    yield ()
    for first in range(1, min(total, largest) + 1):
        for rest in _parts(total - first, first):
            yield (first, *rest)


@examples(120)
@given(data=st.data(), profile=tight_profiles(max_layers=6), rounds=st.integers(1, 6))
def test_no_other_place_for_one_slow_node_has_a_shorter_step(
    data: st.DataObject, profile: Profile, rounds: int
) -> None:
    nodes = names(data.draw(st.integers(2, 4), label="nodes"))
    num_microbatches, fault_threshold = rounds * len(nodes), data.draw(st.integers(0, 1))
    asked = PlannerSettings(
        num_microbatches=num_microbatches, fault_threshold=fault_threshold, mean_time_to_failure_s=FOREVER_S
    )
    planner = Planner(profile, asked)
    try:
        plan = planner.initial_plan(nodes).plan
    except PlanningError:
        assume(False)
    slow = {data.draw(st.sampled_from(nodes)): data.draw(st.sampled_from((1.3, 2.0, 4.0)))}
    best_s = AllPlans(profile, num_microbatches, *slow.values()).step_s(len(nodes), fault_threshold + 1)
    decision = planner.reconfigure(plan, slow=slow)
    assert is_sound(decision, plan, planner)
    assert decision.predicted_step_s <= best_s * 1.001
    # The start with a slow node is as fast, and stays as it is.
    start = planner.initial_plan(nodes, slow=slow)
    assert planner.has_room(start.plan, gradient_copies=0)
    assert start.predicted_step_s <= best_s * 1.001
    assert planner.reconfigure(start.plan, slow=slow).predicted_step_s <= start.predicted_step_s * (1 + 1e-9)


@pytest.mark.parametrize(("model", "num_nodes", "factor"), [("gpt3-2.7b", 2, 3.0), ("gpt3-6.7b", 4, 2.0)])
def test_a_slow_node_gets_a_place_within_a_percent_of_the_best(model: str, num_nodes: int, factor: float) -> None:
    """Where memory is tight, places have different numbers of layers; by the timeline, over all places and cuts."""
    profile = estimate_profile(model_shape(model), device_sheet("A100"), microbatch_size=2, sequence_length=2048)
    asked = PlannerSettings(num_microbatches=32, fault_threshold=0)
    planner, catalog, nodes = Planner(profile, asked), OneKindCatalog(profile, asked), names(num_nodes)
    costs = StageCosts(profile, max_in_flight=32)
    times = PassTimes(costs)
    cuts = [each for each in all_cuts(some_template(num_nodes, profile.num_layers)) if costs.fits(each)]
    places = [_slow_at(place, num_nodes, factor) for place in range(num_nodes)]
    best_s = min(times.step_s(cut, 32, speeds) for cut in cuts for speeds in places)
    reasons = []
    for node in nodes:
        decision = planner.reconfigure(planner.initial_plan(nodes).plan, slow={node: factor})
        for found in (decision, planner.initial_plan(nodes, slow={node: factor})):
            own_s = catalog.exact_step_s(found.plan, {node: 1 / factor})
            assert own_s is not None
            assert own_s <= 1.0051 * best_s
            assert own_s <= found.predicted_step_s * (1 + 1e-9)
        reasons.append(decision.reason)
    assert any("the nodes of pipeline 0 change places" in reason for reason in reasons)
