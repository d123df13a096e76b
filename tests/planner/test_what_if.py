from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb

from hypothesis import example, given
from hypothesis import strategies as st

from oobleck.errors import OobleckError
from oobleck.planner import Decision, LayerTransfer, Planner, PlannerSettings, WorkerId
from oobleck.planner.what_if import LossReport, moved_bytes, transfer_s, what_if_lost
from tests.examples import examples
from tests.planner.simple_profiles import make_profile, node_names


def num_losses(report: LossReport) -> int:
    return sum(case.num_alike for case in report.cases)


def outcome(decision: Decision | None) -> object:
    """What a decision comes to, names aside."""
    if decision is None:
        return None
    sizes = tuple(sorted(len(pipeline.nodes) for pipeline in decision.plan.pipelines))
    return sizes, decision.redundant, round(decision.predicted_step_s, 9)


@examples(25)
@example(forwards_s=[1.0, 1.0, 1.0, 1.0, 1.0, 3.0], num_nodes=6, memory_layers=2)
@given(
    forwards_s=st.lists(st.integers(1, 4).map(float), min_size=3, max_size=6),
    num_nodes=st.integers(1, 8),
    memory_layers=st.integers(1, 6),
)
def test_every_loss_is_like_the_case_that_stands_for_it(forwards_s, num_nodes, memory_layers):
    profile = make_profile(forwards_s, memory_bytes=memory_layers * 4 * 10**8 + 10**8)
    planner = Planner(profile, PlannerSettings(num_microbatches=12))
    nodes = node_names(num_nodes)
    try:
        plan = planner.initial_plan(nodes).plan
    except OobleckError:
        return
    for count, report in ((number, what_if_lost(planner, plan, number)) for number in (1, 2)):
        assert num_losses(report) == comb(num_nodes, count)
        assert not report.is_sample
        expected: Counter[object] = Counter()
        for lost in combinations(nodes, count):
            try:
                expected[outcome(planner.reconfigure(plan, lost=lost))] += 1
            except OobleckError:
                expected[None] += 1
        found: Counter[object] = Counter()
        for case in report.cases:
            found[outcome(case.decision)] += case.num_alike
            assert bool(case.failure) == (case.decision is None)
        assert found == expected


def test_many_kinds_of_losses_are_sampled_evenly_and_said_to_be():
    planner = Planner(make_profile([1.0] * 12), PlannerSettings(num_microbatches=24, num_pipelines=2))
    plan = planner.initial_plan(node_names(24)).plan
    report = what_if_lost(planner, plan, 2, max_cases=10)
    assert report.is_sample
    assert len(report.cases) == 10
    assert report.num_kinds == comb(12, 2) + comb(13, 2)
    assert num_losses(report) < comb(24, 2)
    assert len({case.lost for case in report.cases}) == 10


def test_spares_are_lost_as_well():
    planner = Planner(make_profile([1.0, 1.0]), PlannerSettings(num_microbatches=4, num_pipelines=2))
    plan = planner.initial_plan(node_names(7)).plan
    assert len(plan.spares) == 3
    one, two = (what_if_lost(planner, plan, number) for number in (1, 2))
    assert sorted(case.num_alike for case in one.cases) == [2, 2, 3]
    assert num_losses(two) == comb(7, 2)


def test_transfers_are_counted_where_they_use_the_network():
    profile = make_profile([1.0, 1.0, 1.0])
    layer_bytes = 3 * 10**8

    def transfer(layer: int, source: str, target: str, num_parts: int = 1) -> LayerTransfer:
        return LayerTransfer(
            layer=layer,
            source=WorkerId(node=source, device=0),
            target=WorkerId(node=target, device=1),
            num_parts=num_parts,
        )

    transfers = (transfer(0, "a", "b"), transfer(1, "a", "c", 2), transfer(1, "d", "c", 2), transfer(2, "d", "d"))
    assert moved_bytes(profile, transfers) == 3 * layer_bytes
    # Node a sends a layer and a half at 1 GB/s; what stays on node d takes nothing.
    assert transfer_s(profile, transfers) == 0.45
    assert transfer_s(profile, ()) == 0.0
