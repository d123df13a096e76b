from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import PlanningError
from oobleck.planner import NodeKind, PlannerSettings
from oobleck.planner.costs import StageCosts
from oobleck.planner.kinds import KindCosts
from oobleck.planner.mixed.search import MixedSearch
from oobleck.planner.templates import find_templates
from tests.examples import examples
from tests.planner.drawing import make_layer, make_profile, profiles, uniform_profile
from tests.planner.mixed.drawing import all_pipelines, kinds_of_nodes


def num_stages(costs: KindCosts, counts: Sequence[int]) -> int:
    return sum(number * devices for number, devices in zip(counts, costs.devices, strict=True))


@examples(80)
@given(kinds=kinds_of_nodes(), num_microbatches=st.sampled_from((1, 3, 40)))
def test_pipelines_are_the_best_of_all_orders_and_cuts_within_the_memory(
    kinds: tuple[NodeKind, ...], num_microbatches: int
) -> None:
    costs = KindCosts(kinds, PlannerSettings(num_microbatches=num_microbatches))
    search = MixedSearch(costs, [2] * len(kinds))
    found = set(search.counts())
    for counts in itertools.product(range(3), repeat=len(kinds)):
        rounds = max(1, min(4 * num_stages(costs, counts), num_microbatches))
        everything = all_pipelines(costs, counts) if any(counts) else ()
        possible = [each for each in everything if costs.fits(each)]
        assert (counts in found) == bool(possible)
        if possible:
            best_s = min(costs.timing(each).step_s(rounds) for each in possible)
            chosen = search.template(counts)
            assert costs.fits(chosen)
            assert [chosen.kinds.count(kind) for kind in range(len(kinds))] == list(counts)
            assert costs.timing(chosen).step_s(rounds) == pytest.approx(best_s, rel=1e-9)
            assert search.timing(counts).step_s(rounds) == pytest.approx(best_s, rel=1e-9)


@examples(40)
@given(profile=profiles(max_layers=6), devices=st.sampled_from((1, 2)))
def test_kinds_that_are_alike_make_the_templates_of_one_kind(profile, devices: int) -> None:
    settings = PlannerSettings(num_microbatches=16)
    kinds = [NodeKind(name=name, profile=profile, devices_per_node=devices) for name in ("one", "other")]
    costs = KindCosts(kinds, settings)
    search = MixedSearch(costs, (2, 1))
    alone = StageCosts(profile, devices_per_node=devices, max_in_flight=16)
    templates = find_templates(alone, range(1, 4))
    assert {sum(counts) for counts in search.counts()} == set(templates)
    for counts in search.counts():
        rounds = min(4 * num_stages(costs, counts), 16)
        expected = alone.timing(templates[sum(counts)]).step_s(rounds)
        assert search.timing(counts).step_s(rounds) == pytest.approx(expected, rel=1e-9)


def test_a_slow_kind_of_little_memory_takes_the_layers_that_it_can_hold() -> None:
    layers = [make_layer(3.0, param_bytes=10) for _ in range(8)]
    slow = [make_layer(9.0, param_bytes=10) for _ in range(8)]
    kinds = [
        NodeKind(name="large", profile=make_profile(layers, memory_bytes=10_000)),
        NodeKind(name="small", profile=make_profile(slow, memory_bytes=100)),
    ]
    costs = KindCosts(kinds, PlannerSettings(num_microbatches=32))
    search = MixedSearch(costs, (2, 2))
    assert (0, 2) not in search.counts(), "the small kind cannot hold the model"
    chosen = search.template((1, 1))
    held = {
        kind: stage.stop_layer - stage.first_layer
        for kind, stage in zip(chosen.kinds, chosen.template.stages, strict=True)
    }
    assert held == {0: 6, 1: 2}


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([], "no kinds of nodes were given"),
        ([("a", 4, 1.0), ("a", 4, 1.0)], "kind a is named twice"),
        ([("a", 4, 1.0), ("b", 5, 1.0)], "the profile of b has 5 layers, and that of a 4"),
    ],
)
def test_kinds_that_make_no_cluster_are_refused(kinds, message: str) -> None:
    made = [NodeKind(name=name, profile=uniform_profile(count, seconds=seconds)) for name, count, seconds in kinds]
    with pytest.raises(PlanningError, match=message):
        KindCosts(made, PlannerSettings(num_microbatches=8))


def test_profiles_of_other_models_and_wide_stages_are_refused() -> None:
    kinds = [
        NodeKind(name="a", profile=make_profile([make_layer(1.0, param_bytes=4)])),
        NodeKind(name="b", profile=make_profile([make_layer(1.0, param_bytes=5)])),
    ]
    with pytest.raises(PlanningError, match=r"layer 0 \(block\) has 15 bytes of state in the profile of b, and 12"):
        KindCosts(kinds, PlannerSettings(num_microbatches=8))
    alike = [kinds[0], replace(kinds[0], name="b")]
    with pytest.raises(PlanningError, match="max_devices_per_stage is 2"):
        KindCosts(alike, PlannerSettings(num_microbatches=8, max_devices_per_stage=2))
    with pytest.raises(PlanningError, match="kind a has 0 devices a node"):
        NodeKind(name="a", profile=uniform_profile(2), devices_per_node=0)


def test_nothing_fits_nowhere() -> None:
    costs = KindCosts(
        [NodeKind(name="a", profile=uniform_profile(4, memory_bytes=1))], PlannerSettings(num_microbatches=8)
    )
    assert MixedSearch(costs, (3,)).counts() == []
