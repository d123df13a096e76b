"""Failure domains: f of them, lost at once, cost no layer, wherever the nodes allow that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.errors import PlanningError, Unrecoverable
from oobleck.planner import Decision, ExecutionPlan, NodeKind, Planner, PlannerSettings, Profile
from tests.examples import examples
from tests.planner.drawing import make_profile, profiles, uniform_profile
from tests.planner.test_cut_for_slow_nodes import FOREVER_S, is_sound


def nodes_in(sizes: Mapping[str, int]) -> dict[str, str]:
    """The domain of each node, in an order that keeps no domain together."""
    named = [(number, domain) for domain, size in sizes.items() for number in range(size)]
    return {f"{domain}{number}": domain for number, domain in sorted(named)}


def survives(plan: ExecutionPlan, domain_of: Mapping[str, str], fault_threshold: int) -> bool:
    """Whether each layer has a holder left, whichever domains are lost at once, up to a number."""
    domains = sorted(set(domain_of.values()))
    for lost in combinations(domains, min(fault_threshold, len(domains))):
        left = [layers for place, layers in plan.layers_at.items() if domain_of[place.node] not in lost]
        if frozenset[int]().union(*left) != frozenset(range(plan.num_layers)):
            return False
    return True


def can_be_apart(planner: Planner, domain_of: Mapping[str, str], nodes: Sequence[str], number: int) -> bool:
    """Whether some number of groups of whole domains each hold the model: tries all, on few domains."""
    domains = sorted({domain_of[node] for node in nodes})

    def groups(left: Sequence[str], made: list[list[str]]) -> bool:
        if not left:
            return len(made) == number and all(
                planner.can_hold([node for node in nodes if domain_of[node] in group]) for group in made
            )
        first, *rest = left
        return any(
            groups(rest, [*made[:index], [*group, first], *made[index + 1 :]]) for index, group in enumerate(made)
        ) or (len(made) < number and groups(rest, [*made, [first]]))

    return groups(domains, [])


@examples(80)
@given(
    data=st.data(),
    profile=profiles(min_layers=2, max_layers=7),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    fault_threshold=st.integers(1, 2),
)
def test_domains_lost_at_once_cost_no_layer_before_and_after_every_change(
    data: st.DataObject, profile: Profile, sizes: list[int], fault_threshold: int
) -> None:
    domain_of = nodes_in(dict(zip("abcd", sizes, strict=False)))
    settings = PlannerSettings(
        num_microbatches=data.draw(st.integers(fault_threshold + 1, 24)), fault_threshold=fault_threshold
    )
    planner = Planner(profile, settings, domain_of=domain_of)
    here = list(domain_of)

    def check(decision: Decision) -> None:
        assert decision.redundant == survives(decision.plan, domain_of, fault_threshold)
        if not decision.redundant:
            assert "fewer than" in decision.reason or len(decision.plan.pipelines) <= fault_threshold
        elif len(set(map(domain_of.get, here))) > fault_threshold:
            # With fewer domains than that there is nothing to spread, and f + 1 copies are all that can be asked.
            assert len(decision.plan.pipelines) > fault_threshold

    try:
        decision = planner.initial_plan(here)
        check(decision)
        for _ in range(data.draw(st.integers(0, 4), label="changes")):
            away = sorted(domain_of.keys() - set(here))
            lost = joined = ()
            if away and data.draw(st.booleans(), label="joins"):
                joined = tuple(data.draw(st.lists(st.sampled_from(away), min_size=1, unique=True)))
            elif data.draw(st.booleans(), label="a whole domain"):
                domain = domain_of[data.draw(st.sampled_from(sorted(here)))]
                lost = tuple(node for node in here if domain_of[node] == domain)
            else:
                lost = (data.draw(st.sampled_from(sorted(here))),)
            before, was_redundant = decision.plan, decision.redundant
            here = [node for node in (*here, *joined) if node not in lost]
            assume(here)
            slow = {here[0]: 1.7} if data.draw(st.booleans(), label="slow") else {}
            try:
                decision = planner.reconfigure(before, lost=lost, joined=joined, slow=slow)
            except Unrecoverable:
                assert not was_redundant, "one domain is less than f allows"
                assume(False)
            assert is_sound(decision, before, planner, lost)
            check(decision)
    except PlanningError:
        assume(False)


@examples(50)
@given(
    profile=profiles(min_layers=2, max_layers=6),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    fault_threshold=st.integers(1, 2),
    num_microbatches=st.integers(3, 24),
)
def test_copies_lie_apart_where_groups_of_domains_can_hold_the_model(
    profile: Profile, sizes: list[int], fault_threshold: int, num_microbatches: int
) -> None:
    domain_of = nodes_in(dict(zip("abcd", sizes, strict=False)))
    settings = PlannerSettings(num_microbatches=num_microbatches, fault_threshold=fault_threshold)
    planner, nodes = Planner(profile, settings, domain_of=domain_of), list(domain_of)
    try:
        decision = planner.initial_plan(nodes)
    except PlanningError:
        assume(False)
    if can_be_apart(planner, domain_of, nodes, fault_threshold + 1):
        assert decision.redundant


@examples(40)
@given(profile=profiles(min_layers=2, max_layers=6), number=st.integers(2, 8), fault_threshold=st.integers(0, 2))
def test_domains_of_one_node_each_change_no_plan(profile: Profile, number: int, fault_threshold: int) -> None:
    nodes = [f"node{index}" for index in range(number)]
    settings = PlannerSettings(num_microbatches=12, fault_threshold=fault_threshold)
    plain, named = Planner(profile, settings), Planner(profile, settings, domain_of={node: node for node in nodes})
    try:
        expected = plain.initial_plan(nodes)
    except PlanningError:
        assume(False)
    found = named.initial_plan(nodes)
    assert found.plan == expected.plan
    assert found.predicted_step_s == expected.predicted_step_s
    assert found.redundant == expected.redundant


def test_spares_are_of_different_domains() -> None:
    domain_of = nodes_in({"a": 5, "b": 5, "c": 5})
    settings = PlannerSettings(num_microbatches=24, num_pipelines=2, num_stages=6)
    plan = (
        Planner(uniform_profile(6, memory_bytes=80), settings, domain_of=domain_of).initial_plan(list(domain_of)).plan
    )
    assert len(plan.spares) == 3
    assert {domain_of[node] for node in plan.spares} == {"a", "b", "c"}


def test_the_nodes_of_a_plan_for_fewer_are_of_all_domains() -> None:
    domain_of = {f"node{number}": "ab"[number // 4] for number in range(8)}
    planner = Planner(uniform_profile(4), PlannerSettings(num_microbatches=8), domain_of=domain_of)
    assert {domain_of[node] for node in planner.best_first(list(domain_of))[:2]} == {"a", "b"}


def test_redundancy_over_domains_is_bought_up_to_its_price() -> None:
    """Seven nodes of one domain and one of another: apart, the one trains alone, and the seven wait for it."""
    domain_of = nodes_in({"a": 7, "b": 1})
    profile = uniform_profile(8)

    def plan(max_percent: float | None) -> Decision:
        settings = PlannerSettings(num_microbatches=32, num_pipelines=2, max_redundancy_percent=max_percent)
        return Planner(profile, settings, domain_of=domain_of).initial_plan(list(domain_of))

    assert plan(None).redundant
    near, far = plan(20.0), plan(1e6)
    assert far.redundant
    assert not near.redundant
    assert near.predicted_step_s <= far.predicted_step_s / 1.2


def test_nodes_of_several_kinds_lie_apart_too() -> None:
    domain_of = {f"{kind}{number}": "xy"[number // 2] for kind in "ab" for number in range(4)}
    kinds = [
        NodeKind(name=kind, profile=make_profile(uniform_profile(6, memory_bytes=memory).layers, memory_bytes=memory))
        for kind, memory in (("a", 10**6), ("b", 60))
    ]
    kind_of = {node: node[0] for node in domain_of}
    planner = Planner(kinds, PlannerSettings(num_microbatches=24), kind_of, domain_of=domain_of)
    decision = planner.initial_plan(list(domain_of))
    assert decision.redundant
    assert survives(decision.plan, domain_of, 1)
    lost = [node for node, domain in domain_of.items() if domain == "x"]
    after = planner.reconfigure(decision.plan, lost=lost)
    assert set(after.plan.nodes) <= domain_of.keys() - set(lost)
    back = planner.reconfigure(after.plan, joined=lost)
    assert back.redundant
    assert survives(back.plan, domain_of, 1)


def test_a_plan_that_cannot_be_spread_says_so() -> None:
    domain_of = {f"node{number}": "rack" for number in range(3)} | {"node3": "other"}
    planner = Planner(uniform_profile(4, memory_bytes=40), PlannerSettings(num_microbatches=8), domain_of=domain_of)
    decision = planner.initial_plan(list(domain_of))
    assert len(decision.plan.pipelines) == 2
    assert not decision.redundant
    assert decision.reason.endswith("copies of some layers lie in fewer than 2 failure domains, which f = 1 asks for")


@pytest.mark.parametrize("fault_threshold", [1, 2])
def test_a_thousand_nodes_in_racks_are_planned_in_a_moment(fault_threshold: int) -> None:
    domain_of = {f"node{number}": f"rack{number // 16}" for number in range(1024)}
    settings = PlannerSettings(
        num_microbatches=4096, fault_threshold=fault_threshold, mean_time_to_failure_s=FOREVER_S, num_stages=8
    )
    planner = Planner(uniform_profile(24, memory_bytes=150), settings, domain_of=domain_of)
    decision = planner.initial_plan(list(domain_of))
    assert decision.redundant
    lost = [node for node, domain in domain_of.items() if domain in ("rack3", "rack40")[:fault_threshold]]
    after = planner.reconfigure(decision.plan, lost=lost)
    assert after.redundant
