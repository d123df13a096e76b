"""Stages cut anew for slow nodes: as good as the best of all cuts, and within the memory."""

from __future__ import annotations

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.planner import PipelineTemplate, Profile
from oobleck.planner.costs import StageCosts
from oobleck.planner.templates import cut_for_speeds, find_templates
from oobleck.planner.templates.recut import with_stops
from tests.examples import examples
from tests.planner.drawing import profiles, uniform_profile

SPEEDS = st.sampled_from((1.0, 1.0, 1 / 1.3, 0.5, 0.2))


def best_of_all_s(costs: StageCosts, template: PipelineTemplate, speeds: list[float], num_microbatches: int) -> float:
    """The shortest step over all cuts that fit, by trying each."""
    inner = itertools.combinations(range(1, costs.num_layers), template.num_stages - 1)
    cuts = (with_stops(template, [0, *stops, costs.num_layers]) for stops in inner)
    return min(costs.timing(cut, speeds).step_s(num_microbatches) for cut in cuts if costs.fits(cut))


@examples(150)
@given(
    data=st.data(),
    profile=profiles(min_layers=3, max_layers=8, device_counts=(1, 2)),
    per_node=st.sampled_from((1, 2)),
    num_microbatches=st.sampled_from((1, 2, 5, 24)),
)
def test_no_cut_that_fits_is_faster(
    data: st.DataObject, profile: Profile, per_node: int, num_microbatches: int
) -> None:
    costs = StageCosts(
        profile, devices_per_node=per_node, max_devices_per_stage=per_node, max_in_flight=num_microbatches
    )
    templates = find_templates(costs, range(2, 5))
    assume(templates)
    template = data.draw(st.sampled_from(list(templates.values())), label="template")
    speeds = data.draw(st.lists(SPEEDS, min_size=template.num_nodes, max_size=template.num_nodes), label="speeds")
    cut = cut_for_speeds(costs, template, speeds, num_microbatches)
    assert costs.fits(cut)
    assert [stage.first_layer for stage in cut.stages] == [0, *(stage.stop_layer for stage in cut.stages[:-1])]
    assert cut.stages[-1].stop_layer == costs.num_layers
    places = [(stage.node_index, stage.first_device, stage.num_devices) for stage in cut.stages]
    assert places == [(stage.node_index, stage.first_device, stage.num_devices) for stage in template.stages]
    cut_s = costs.timing(cut, speeds).step_s(num_microbatches)
    assert cut_s <= best_of_all_s(costs, template, speeds, num_microbatches) * (1 + 1e-5)


def test_a_node_that_takes_twice_as_long_gets_half_of_the_layers() -> None:
    costs = StageCosts(uniform_profile(21), max_in_flight=24)
    template = find_templates(costs, [4])[4]
    cut = cut_for_speeds(costs, template, [1.0, 0.5, 1.0, 1.0], 24)
    assert [stage.stop_layer - stage.first_layer for stage in cut.stages] == [6, 3, 6, 6]


def test_what_cannot_be_faster_is_returned_as_it_is() -> None:
    costs = StageCosts(uniform_profile(4), max_in_flight=24)
    whole, spread = find_templates(costs, [1])[1], find_templates(costs, [4])[4]
    assert cut_for_speeds(costs, whole, [0.5], 24) is whole
    assert cut_for_speeds(costs, spread, [1.0, 0.5, 1.0, 1.0], 24) is spread, "each stage has one layer"


def test_memory_limits_what_the_others_take_over() -> None:
    roomy = StageCosts(uniform_profile(20), max_in_flight=24)
    template = find_templates(roomy, [4])[4]
    scarce = StageCosts(uniform_profile(20, memory_bytes=104), max_in_flight=24)
    assert scarce.fits(template)
    assert (
        max(
            stage.stop_layer - stage.first_layer for stage in cut_for_speeds(roomy, template, [1, 0.2, 1, 1], 24).stages
        )
        > 5
    )
    cut = cut_for_speeds(scarce, template, [1, 0.2, 1, 1], 24)
    sizes = [stage.stop_layer - stage.first_layer for stage in cut.stages]
    assert sizes == [5, 4, 5, 6], "the last stage has fewest microbatches in flight"
