from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import ConfigError
from oobleck.planner import Decision, ExecutionPlan, Planner, PlannerSettings
from tests.examples import examples
from tests.planner.drawing import uniform_profile

PROFILE = uniform_profile(6, memory_bytes=80, seconds=0.5)


@examples(50)
@given(num_nodes=st.integers(4, 9), num_lost=st.integers(1, 2), devices=st.sampled_from([1, 2]))
def test_a_decision_and_its_plan_are_read_as_they_were_written(num_nodes: int, num_lost: int, devices: int):
    planner = Planner(PROFILE, PlannerSettings(num_microbatches=16, devices_per_node=devices))
    nodes = [f"node{number}" for number in range(num_nodes)]
    first = planner.initial_plan(nodes)
    for decision in (first, planner.reconfigure(first.plan, lost=frozenset(nodes[:num_lost]))):
        written = json.loads(json.dumps(decision.to_dict(), allow_nan=False))
        assert Decision.from_dict(written) == decision
        assert ExecutionPlan.from_dict(written["plan"]) == decision.plan


def test_what_is_wrong_is_named_with_its_place():
    decision = Planner(PROFILE, PlannerSettings(num_microbatches=16)).initial_plan(["a", "b", "c", "d"])
    written = decision.to_dict()
    with pytest.raises(ConfigError, match="the decision: action is 5; it must be text"):
        Decision.from_dict({**written, "action": 5})
    with pytest.raises(ConfigError, match="the decision: redundant is missing"):
        Decision.from_dict({key: value for key, value in written.items() if key != "redundant"})
    plan = decision.plan.to_dict()
    for broken, problem in (
        ({**plan, "spare": []}, "the plan: unknown key 'spare'; did you mean 'spares'?"),
        (
            {"pipelines": [{"nodes": ["a"], "num_microbatches": 1, "stages": [{}]}], "spares": []},
            "first_layer is missing",
        ),
        ({"pipelines": [7], "spares": []}, "pipeline 0 must be an object"),
    ):
        with pytest.raises(ConfigError, match=re.escape(problem)):
            ExecutionPlan.from_dict(broken)
