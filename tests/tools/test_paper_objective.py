from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner import Profile
from oobleck.planner.costs import StageCosts
from tests.examples import examples
from tests.planner.drawing import profiles, uniform_profile
from tests.planner.templates.test_templates import all_templates
from tools.bench.paper_objective import find_paper_templates, paper_step_s


def test_the_equations_by_hand() -> None:
    # Slowest stage k = 1, S = 3, Nb = 12: T1 = 9, T2 = (12 - 3 + 1 - 1) · 4 = 36, T3 = 4 + 3 = 7.
    assert paper_step_s([2.0, 4.0, 3.0]) == 9 + 36 + 7


def test_the_rightmost_of_equally_slow_stages_counts() -> None:
    # k = 2: T1 = 11, T2 = (9 + 2 - 1) · 4 = 40, T3 = 4.
    assert paper_step_s([4.0, 3.0, 4.0]) == 11 + 40 + 4


@examples(120)
@given(profile=profiles(max_layers=6, device_counts=(1, 2, 4)), shape=st.sampled_from(((1, 1), (2, 1), (2, 2), (4, 4))))
def test_templates_are_the_best_of_all_cuts_under_the_papers_objective(
    profile: Profile, shape: tuple[int, int]
) -> None:
    per_node, per_stage = shape
    costs = StageCosts(
        profile, devices_per_node=per_node, max_devices_per_stage=per_stage, max_in_flight=1, communication=False
    )
    most_nodes = 6 if per_node == 1 else 2
    found = find_paper_templates(
        profile, range(1, most_nodes + 1), devices_per_node=per_node, max_devices_per_stage=per_stage
    )
    for num_nodes in range(1, most_nodes + 1):
        times = [paper_step_s(costs.stage_seconds(template)) for template in all_templates(costs, num_nodes)]
        if not times:
            assert num_nodes not in found
            continue
        template, value = found[num_nodes]
        assert value == pytest.approx(min(times), rel=1e-9)
        assert paper_step_s(costs.stage_seconds(template)) == pytest.approx(value, rel=1e-9)


def test_no_possible_size_gives_no_template() -> None:
    assert find_paper_templates(uniform_profile(2), [3, 4]) == {}
