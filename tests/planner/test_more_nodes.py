"""One node more makes no step longer, unless it is for redundancy, which has a price that can be capped."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import PlanningError
from oobleck.planner import Planner, PlannerSettings, Profile
from tests.examples import examples
from tests.planner.drawing import profiles
from tests.planner.simple_profiles import node_names
from tests.planner.test_more_memory import exact_s


@examples(60)
@given(
    profile=profiles(min_layers=2, max_layers=8),
    num_nodes=st.integers(1, 8),
    rounds=st.integers(1, 6),
    times_faster=st.floats(1 / 20, 20),
    most_percent=st.sampled_from((0.0, 5.0, 20.0)),
)
def test_one_node_more_makes_no_step_longer_than_redundancy_may_cost(
    profile: Profile, num_nodes: int, rounds: int, times_faster: float, most_percent: float
) -> None:
    """On networks of which the fastest is 400 times as fast as the slowest."""
    rate = profile.network.inter_node_bytes_per_s * times_faster
    profile = replace(profile, network=replace(profile.network, inter_node_bytes_per_s=rate))
    settings = PlannerSettings(num_microbatches=rounds * (num_nodes + 1), max_redundancy_percent=most_percent)
    try:
        fewer = Planner(profile, settings).initial_plan(node_names(num_nodes)).plan
    except PlanningError:
        return
    more = Planner(profile, settings).initial_plan(node_names(num_nodes + 1)).plan
    fewer_s, more_s = (exact_s(profile, settings, plan) for plan in (fewer, more))
    assert more_s <= 1.02 * (1 + most_percent / 100) * fewer_s
