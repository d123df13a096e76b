"""Several kinds: memory counts the microbatches that a pipeline itself has in flight, too."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import PlanningError, Unrecoverable
from oobleck.planner import ExecutionPlan, NodeKind, Planner, PlannerSettings
from oobleck.planner.kinds import Counts, Form, KindCosts
from tests.examples import examples
from tests.planner.drawing import make_layer, make_profile
from tests.planner.mixed.drawing import all_pipelines, kinds_of_nodes


def most_pipelines(costs: KindCosts, total: Counts, num_microbatches: int) -> int:
    """Return the most pipelines that take a step's microbatches on these nodes, 0 for none."""
    sizes = [counts for counts in product(*(range(number + 1) for number in total)) if any(counts)]
    most_of = {
        counts: max(
            (
                share
                for share in range(num_microbatches + 1)
                if not share or any(costs.fits(form, share) for form in all_pipelines(costs, counts))
            ),
            default=0,
        )
        for counts in sizes
    }

    @cache
    def most(left: int, nodes: Counts) -> float:
        if not left:
            return 0
        found = -math.inf
        for counts, own in most_of.items():
            rest = tuple(have - used for have, used in zip(nodes, counts, strict=True))
            if min(rest) >= 0:
                found = max([found, *(most(left - share, rest) + 1 for share in range(1, min(own, left) + 1))])
        return found

    return int(max(0, most(num_microbatches, total)))


def check(costs: KindCosts, plan: ExecutionPlan, settings: PlannerSettings, most: int) -> None:
    assert plan.num_microbatches == settings.num_microbatches
    for each in plan.pipelines:
        form = Form(template=each.template, kinds=tuple(int(node[0]) for node in each.nodes))
        assert costs.fits(form, each.num_microbatches)
    assert len(plan.pipelines) >= min(settings.fault_threshold + 1, most)


def named(total: Counts) -> list[str]:
    return [f"{kind}-{number}" for kind, numbers in enumerate(total) for number in range(numbers)]


@examples(80)
@given(
    data=st.data(),
    kinds=kinds_of_nodes(max_layers=5, devices=((1, 1), (1, 2))),
    total=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    num_microbatches=st.integers(1, 4),
    fault_threshold=st.integers(0, 2),
)
def test_no_plan_is_refused_that_memory_allows(
    data: st.DataObject, kinds: tuple[NodeKind, ...], total: Counts, num_microbatches: int, fault_threshold: int
) -> None:
    settings = PlannerSettings(num_microbatches=num_microbatches, fault_threshold=fault_threshold)
    if num_microbatches >= sum(number * kind.devices_per_node for number, kind in zip(total, kinds, strict=True)):
        return
    costs, nodes = KindCosts(kinds, settings), named(total)
    kind_of = {node: kinds[int(node[0])].name for node in nodes}
    most = most_pipelines(costs, total, num_microbatches)
    try:
        before = Planner(kinds, settings, kind_of).initial_plan(nodes).plan
    except PlanningError:
        assert not most
        return
    check(costs, before, settings, most)
    slow = {data.draw(st.sampled_from(nodes)): 2.0}
    check(costs, Planner(kinds, settings, kind_of).reconfigure(before, slow=slow).plan, settings, most)
    lost = data.draw(st.sampled_from(before.nodes))
    left = tuple(number - (kind == int(lost[0])) for kind, number in enumerate(total))
    few = num_microbatches < sum(number * kind.devices_per_node for number, kind in zip(left, kinds, strict=True))
    most = most_pipelines(costs, left, num_microbatches) if any(left) else 0
    try:
        after = Planner(kinds, settings, kind_of).reconfigure(before, lost=[lost]).plan
    except Unrecoverable:
        return
    except PlanningError:
        assert not most
        return
    check(costs, after, settings, most if few else 0)


def test_nodes_of_two_kinds_take_a_few_microbatches_each() -> None:
    """Two in flight take 60 of 65 bytes of the first of four stages; three would take 70."""
    profile = make_profile(
        [make_layer(param_bytes=10, activation_bytes=10, output_bytes=1) for _ in range(4)], memory_bytes=65
    )
    kinds = [NodeKind(name=name, profile=profile) for name in ("a", "b")]
    nodes = named((4, 4))
    kind_of = {node: "ab"[int(node[0])] for node in nodes}
    plan = Planner(kinds, PlannerSettings(num_microbatches=4), kind_of).initial_plan(nodes).plan
    assert [(len(each.nodes), each.num_microbatches) for each in plan.pipelines] == [(4, 2), (4, 2)]
