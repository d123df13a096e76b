from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.errors import PlanningError, Unrecoverable
from oobleck.planner import (
    Decision,
    ExecutionPlan,
    NodeKind,
    Planner,
    PlannerSettings,
    Profile,
    WorkerId,
    with_shared_links,
)
from oobleck.planner.instantiation import distribute_microbatches, reduction_s
from oobleck.planner.kinds import Form, KindCosts
from oobleck.planner.mixed import MixedCatalog
from oobleck.schedule import ScheduleKind
from oobleck.schedule.forecast import forecast
from oobleck.schedule.interleaving import make_cutter
from tests.examples import examples
from tests.planner.drawing import make_layer, make_network, make_profile, profiles
from tests.planner.mixed.drawing import all_pipelines, kinds_of_nodes

FREE = make_network(latency_s=0.0, inter=1e15)


def names(kind: str, count: int) -> list[str]:
    return [f"{kind}{number}" for number in range(count)]


def two_kinds(num_layers: int = 12, slowness: float = 2.0, **profile: object) -> list[NodeKind]:
    """Fast nodes a0, a1, … and slow ones b0, b1, …"""
    return [
        NodeKind(
            name=name,
            profile=make_profile([make_layer(3.0 * factor, name=f"layer {i}") for i in range(num_layers)], **profile),
        )
        for name, factor in (("a", 1.0), ("b", slowness))
    ]


def kind_of(nodes: Sequence[str]) -> dict[str, str]:
    return {node: node[0] for node in nodes}


def planner_for(kinds: Sequence[NodeKind], nodes: Sequence[str], **settings: int) -> Planner:
    return Planner(kinds, PlannerSettings(**{"num_microbatches": 24, **settings}), kind_of([*nodes, "a9", "b9"]))


def groups(counts: tuple[int, ...], most: int) -> Iterator[list[tuple[int, ...]]]:
    """All multisets of pipelines, as nodes of each kind; some nodes may be left."""
    shapes = [shape for shape in itertools.product(*(range(number + 1) for number in counts)) if any(shape)]

    def extend(start: int, left: tuple[int, ...], chosen: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        if chosen:
            yield chosen
        for index in range(start, len(shapes) if len(chosen) < most else 0):
            rest = tuple(have - used for have, used in zip(left, shapes[index], strict=True))
            if min(rest) >= 0:
                yield from extend(index, rest, [*chosen, shapes[index]])

    return extend(0, counts, [])


@examples(40)
@given(
    kinds=kinds_of_nodes(max_layers=4, devices=((1, 1), (1, 2))),
    counts=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    num_microbatches=st.sampled_from((3, 12)),
)
def test_no_other_pipelines_over_any_nodes_in_any_order_are_faster(
    kinds: tuple[NodeKind, ...], counts: tuple[int, int], num_microbatches: int
) -> None:
    """With their reduction. Templates are cut for as many microbatches as there are in a step."""
    settings = PlannerSettings(num_microbatches=num_microbatches, microbatches_per_device=num_microbatches)
    nodes = {f"{kind}{n}": kinds[kind].name for kind in (0, 1) for n in range(counts[kind])}
    assume(nodes)
    planner, costs = Planner(kinds, settings, nodes), KindCosts(kinds, settings)
    timings = {}
    for shape in itertools.product(*(range(number + 1) for number in counts)):
        if any(shape):
            fitting = [costs.timing(each) for each in all_pipelines(costs, shape) if costs.fits(each)]
            if fitting:
                timings[shape] = min(fitting, key=lambda timing: timing.step_s(num_microbatches))
    if not timings:
        with pytest.raises(PlanningError):
            planner.initial_plan(list(nodes))
        return
    forms = MixedCatalog(kinds, settings, nodes).forms(timings, counts)
    reduced = {shape: costs.of[0].reduced_bytes(form.template) for shape, form in forms.items()}
    steps_s: dict[int, list[float]] = {}
    for shapes in groups(counts, num_microbatches):
        if all(shape in timings for shape in shapes):
            own = [timings[shape] for shape in shapes]
            shares = distribute_microbatches(own, num_microbatches)
            slowest_s = max(timing.step_s(share) for timing, share in zip(own, shares, strict=True))
            step_s = slowest_s + reduction_s(costs.network, max(reduced[shape] for shape in shapes), len(shapes))
            steps_s.setdefault(min(len(shapes), 2), []).append(step_s)
    decision = planner.initial_plan(list(nodes))
    wanted = max(steps_s)
    assert min(len(decision.plan.pipelines), 2) == wanted
    # With few microbatches a pipeline's best cut for all of them need not be the best for its share.
    assert decision.predicted_step_s <= min(steps_s[wanted]) * (1 + 1e-9)


def timeline_s(planner: Planner, decision: Decision) -> float:
    """The seconds of a plan's step by its schedule's timeline, with no node slow."""
    shared = with_shared_links([kind.profile for kind in planner.kinds])
    profile_of = dict(zip([kind.name for kind in planner.kinds], shared, strict=True))
    return forecast(shared[0], decision.plan, profile_of=lambda node: profile_of[planner.kind_of(node)]).step_s


def check(planner: Planner, kinds: Sequence[NodeKind], decision: Decision, nodes: Sequence[str]) -> None:
    """A plan uses each node once, fits all devices, takes the whole batch, and no longer than is predicted."""
    plan = decision.plan
    assert timeline_s(planner, decision) <= decision.predicted_step_s * (1 + 1e-9)
    assert sorted([*plan.nodes, *plan.spares]) == sorted(nodes)
    assert plan.num_microbatches == planner.settings.num_microbatches
    assert planner.has_room(plan, gradient_copies=0)
    devices = {kind.name: kind.devices_per_node for kind in kinds}
    for pipeline in plan.pipelines:
        for index, node in enumerate(pipeline.nodes):
            stages = [stage for stage in pipeline.template.stages if stage.node_index == index]
            assert [stage.first_device for stage in stages] == list(range(devices[planner.kind_of(node)]))


@examples(40)
@given(kinds=kinds_of_nodes(max_layers=5, devices=((1, 1), (1, 2), (2, 1))), data=st.data())
def test_after_any_losses_and_joins_every_worker_gets_what_it_lacks(
    kinds: tuple[NodeKind, ...], data: st.DataObject
) -> None:
    counts = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)), label="nodes")
    kind_of_node = {f"{kind}{n}": kinds[kind].name for kind in (0, 1) for n in range(counts[kind])}
    kind_of_node |= {"new0": kinds[0].name, "new1": kinds[1].name}
    nodes = [node for node in kind_of_node if not node.startswith("new")]
    planner = Planner(kinds, PlannerSettings(num_microbatches=12), kind_of_node)
    try:
        plan = planner.initial_plan(nodes).plan
    except PlanningError:
        assume(False)
    check(planner, kinds, planner.initial_plan(nodes), nodes)
    lost = data.draw(st.sets(st.sampled_from(nodes), max_size=2), label="lost")
    joined = data.draw(st.sets(st.sampled_from(("new0", "new1"))), label="joined")
    slow = data.draw(st.dictionaries(st.sampled_from(nodes), st.sampled_from((1.5, 4.0)), max_size=2), label="slow")
    try:
        decision = planner.reconfigure(plan, lost=lost, joined=joined, slow=slow)
    except (PlanningError, Unrecoverable):
        return
    check(planner, kinds, decision, [node for node in {*nodes, *joined} if node not in lost])
    held = {worker: set(layers) for worker, layers in plan.layers_at.items() if worker.node not in lost}
    for transfer in decision.transfers:
        assert transfer.layer in held[transfer.source]
    arrived: dict[object, set[int]] = {worker: set(layers) for worker, layers in held.items()}
    for transfer in decision.transfers:
        arrived.setdefault(transfer.target, set()).add(transfer.layer)
    assert all(layers <= arrived[worker] for worker, layers in decision.plan.layers_at.items())
    assert planner.reconfigure(plan, lost=lost, joined=joined, slow=slow) == decision
    again = Planner(kinds, planner.settings, kind_of_node)
    assert again.reconfigure(plan, lost=lost, joined=joined, slow=slow) == decision, "the same from any planner"


@examples(40)
@given(kinds=kinds_of_nodes(max_layers=5, devices=((1, 2), (2, 1), (3, 2))), data=st.data())
def test_nodes_that_come_back_as_another_kind_get_stages_for_the_devices_that_they_have(
    kinds: tuple[NodeKind, ...], data: st.DataObject
) -> None:
    """Before a step every worker can make the initial values, so the plan loses no node: only its devices tell."""
    nodes = names("node", data.draw(st.integers(1, 4), label="nodes"))
    before, after = (data.draw(st.fixed_dictionaries({node: drawn_kinds(kinds) for node in nodes})) for _ in range(2))
    settings = PlannerSettings(num_microbatches=12)
    planner = Planner(kinds, settings, after)
    try:
        plan = Planner(kinds, settings, before).initial_plan(nodes).plan
        planner.initial_plan(nodes)
    except PlanningError:
        assume(False)
    devices = {kind.name: kind.devices_per_node for kind in kinds}
    every = frozenset(range(plan.num_layers))
    held = {WorkerId(node, device): every for node in nodes for device in range(devices[after[node]])}
    slow = data.draw(st.dictionaries(st.sampled_from(nodes), st.sampled_from((1.5, 4.0)), max_size=1), label="slow")
    if data.draw(st.booleans(), label="trained"):
        changed = [node for node in nodes if before[node] != after[node]]
        try:
            decision = planner.reconfigure(plan, lost=changed, joined=changed, slow=slow)
        except Unrecoverable:
            return
    else:
        decision = planner.reconfigure(plan, slow=slow, held=held)
    assert {*decision.plan.worker_ids} <= held.keys()
    assert planner.has_room(decision.plan, gradient_copies=0)


def drawn_kinds(kinds: Sequence[NodeKind]) -> st.SearchStrategy[str]:
    return st.sampled_from([kind.name for kind in kinds])


@examples(40)
@given(profile=profiles(max_layers=6), num_nodes=st.integers(1, 6), num_microbatches=st.sampled_from((1, 5, 24)))
def test_one_kind_is_the_case_with_one_entry(profile: Profile, num_nodes: int, num_microbatches: int) -> None:
    """Named, or beside another kind that no node is of: as good as without a name."""
    profile = replace(profile, network=FREE)
    settings, nodes = PlannerSettings(num_microbatches=num_microbatches), names("a", num_nodes)
    plain = Planner(profile, settings)
    kinds = [NodeKind(name=name, profile=profile) for name in ("a", "b")]
    named, beside = Planner(kinds[:1], settings, kind_of(nodes)), Planner(kinds, settings, kind_of(nodes))
    assert plain.can_hold(nodes) == named.can_hold(nodes) == beside.can_hold(nodes)
    assume(plain.can_hold(nodes))
    assert plain.fewest_nodes(nodes) == named.fewest_nodes(nodes) == beside.fewest_nodes(nodes)
    assert plain.step_s(nodes) == named.step_s(nodes) == pytest.approx(beside.step_s(nodes), rel=1e-9)
    decision = plain.initial_plan(nodes)
    assert named.initial_plan(nodes) == decision
    assert len(beside.initial_plan(nodes).plan.pipelines) >= min(len(decision.plan.pipelines), 2)
    lost = decision.plan.nodes[:1]
    try:
        after = plain.reconfigure(decision.plan, lost=lost, joined=["a9"])
    except Unrecoverable:
        return
    assert named.reconfigure(decision.plan, lost=lost, joined=["a9"]) == after
    beside = Planner(kinds, settings, kind_of([*nodes, "a9"]))
    assert beside.reconfigure(decision.plan, lost=lost, joined=["a9"]).plan.num_microbatches == num_microbatches


def test_pipelines_of_slow_nodes_take_fewer_microbatches() -> None:
    nodes = [*names("a", 2), *names("b", 2)]
    decision = planner_for(two_kinds(network=FREE), nodes).initial_plan(nodes)
    shares = {pipeline.nodes[0][0]: pipeline.num_microbatches for pipeline in decision.plan.pipelines}
    assert shares["a"] == 2 * shares["b"]
    assert decision.reason == "4 nodes form 4 pipelines (2 × (1 a), 2 × (1 b))"


def test_a_kind_that_cannot_hold_the_model_alone_helps_another() -> None:
    kinds = two_kinds(8, 1.0)
    small = NodeKind(
        name="b", profile=make_profile([make_layer(3.0, name=f"layer {i}") for i in range(8)], memory_bytes=50)
    )
    nodes = [*names("a", 2), *names("b", 2)]
    plan = planner_for([kinds[0], small], nodes).initial_plan(nodes).plan
    assert not plan.spares
    assert all("a" in {node[0] for node in pipeline.nodes} for pipeline in plan.pipelines)


def test_a_lost_node_is_replaced_by_a_spare_of_its_kind_and_nothing_else_moves() -> None:
    kinds = two_kinds(memory_bytes=120)
    nodes = [*names("a", 4), *names("b", 4)]
    planner = planner_for(kinds, nodes)
    plan = planner.initial_plan(nodes).plan
    lost = plan.pipelines[-1].nodes[0]
    same = planner.reconfigure(plan, lost=[lost], joined=[f"{lost[0]}9"])
    assert same.action == "reinstantiate"
    assert {transfer.target.node for transfer in same.transfers} == {f"{lost[0]}9"}
    assert [pipeline.template for pipeline in same.plan.pipelines] == [pipeline.template for pipeline in plan.pipelines]
    assert planner.reconfigure(plan).plan == plan


def test_what_is_wrong_is_named() -> None:
    nodes = [*names("a", 2), "c0"]
    planner = planner_for(two_kinds(), nodes)
    with pytest.raises(PlanningError, match="node c0 is of kind c, which has no profile; there is one of a and b"):
        planner.initial_plan(nodes)
    with pytest.raises(PlanningError, match="node d0 has no kind"):
        planner.initial_plan(["a0", "d0"])
    with pytest.raises(PlanningError, match="node a0 is named twice"):
        planner.initial_plan(["a0", "a0"])
    with pytest.raises(PlanningError, match="no nodes were given"):
        planner.initial_plan([])
    tight = planner_for(two_kinds(memory_bytes=40), nodes)
    with pytest.raises(PlanningError, match="2 nodes of 1 × a cannot hold the model"):
        tight.initial_plan(["a0", "a1"])
    with pytest.raises(PlanningError, match="fits on a device of no kind"):
        planner_for(two_kinds(memory_bytes=4), nodes).initial_plan(["a0"])
    with pytest.raises(PlanningError, match="kind b has no price"):
        planner.cheapest_nodes(["a0", "b0"], {"a": 1.0})


def test_the_cheapest_nodes_are_named() -> None:
    nodes = [*names("a", 3), *names("b", 3)]
    planner = planner_for(two_kinds(network=FREE), nodes, fault_threshold=0)
    assert set(planner.cheapest_nodes(nodes, {"a": 1.0, "b": 0.9}) or ()) <= set(names("a", 3))
    assert set(planner.cheapest_nodes(nodes, {"a": 1.0, "b": 0.1}) or ()) <= set(names("b", 3))


def test_a_plan_finishes_its_step_as_its_kinds_compute() -> None:
    nodes = [*names("a", 2), *names("b", 2)]
    kinds = two_kinds(network=FREE)
    planner = planner_for(kinds, nodes)
    plan = planner.initial_plan(nodes).plan
    slow = next(index for index, pipeline in enumerate(plan.pipelines) if pipeline.nodes[0].startswith("b"))
    timing = KindCosts(kinds, planner.settings).timing(Form(template=plan.pipelines[slow].template, kinds=(1,)))
    taken = plan.pipelines[slow].num_microbatches
    assert planner.rest_s(plan, {slow: (1, 2)}) == pytest.approx(timing.next_s + timing.step_s(2))
    assert planner.rest_s(plan, {slow: (taken, 0)}) == pytest.approx(timing.step_s(taken))
    assert planner.rest_s(plan, {slow: (1, 0)}, slow={plan.pipelines[slow].nodes[0]: 3.0}) == pytest.approx(
        3 * timing.next_s
    )


def test_nodes_are_counted_from_the_fastest_on() -> None:
    nodes = [*names("b", 3), *names("a", 3)]
    planner = planner_for(two_kinds(memory_bytes=120), nodes)
    ordered = planner.best_first(nodes)
    assert ordered == [*names("a", 3), *names("b", 3)]
    assert (
        planner_for(
            [replace(kind, devices_per_node=4 if kind.name == "b" else 1) for kind in two_kinds()], nodes
        ).best_first(nodes)
        == nodes
    ), "four slow devices are faster than one"
    fewest = planner.fewest_nodes(ordered)
    assert len(planner.initial_plan(ordered[:fewest]).plan.pipelines) == 2
    assert not planner.can_hold(ordered[:1])
    with pytest.raises(PlanningError):
        planner.fewest_nodes(ordered[:1])
    for count in range(2, len(nodes) + 1):
        chosen = ordered[:count]
        assert planner.can_hold(chosen)
        assert planner.step_s(chosen) == pytest.approx(planner.initial_plan(chosen).bound_step_s)
        is_enough = len(planner.initial_plan(chosen).plan.pipelines) == 2
        assert is_enough == (count >= fewest)


@pytest.mark.parametrize("inter", [1.0, 10.0, 1000.0])
def test_the_prediction_over_kinds_is_the_timelines(inter: float) -> None:
    """Bounds, which choose, are longer: messages count as work there."""
    kinds = two_kinds(network=make_network(inter, inter))
    nodes = [*names("a", 4), *names("b", 3)]
    planner = planner_for(kinds, nodes, num_pipelines=2)
    started = planner.initial_plan(nodes)
    lost = planner.reconfigure(started.plan, lost=["b1"])
    for decision in (started, lost):
        assert decision.predicted_step_s == pytest.approx(timeline_s(planner, decision), rel=1e-3)
        assert decision.predicted_step_s <= decision.bound_step_s * (1 + 1e-9)
    slowed = planner.reconfigure(started.plan, slow=dict.fromkeys(nodes, 2.0))
    assert started.predicted_step_s < slowed.predicted_step_s <= 2 * started.predicted_step_s * (1 + 1e-9)


def test_a_plan_in_chunks_continues_once_another_kind_joins() -> None:
    """Planned while all nodes were of one kind, with an interleaved schedule."""
    fast, slow = two_kinds(memory_bytes=120, network=FREE)
    nodes = names("a", 4)
    cutter = make_cutter(ScheduleKind.INTERLEAVED, 2)
    alone = Planner(fast.profile, PlannerSettings(num_microbatches=24), make_cutter=cutter)
    plan = alone.initial_plan(nodes).plan
    assert {pipeline.template.num_chunks for pipeline in plan.pipelines} == {2}
    planner = planner_for([fast, slow], [*nodes, *names("b", 2)])
    rests = dict.fromkeys(range(len(plan.pipelines)), (2, 1))
    exact_s = alone.rest_s(plan, rests)
    assert exact_s <= planner.rest_s(plan, rests) < 1.1 * exact_s, "the bound of 1F1B"
    assert planner.has_room(plan, gradient_copies=0) == alone.has_room(plan, gradient_copies=0)
    check_decision(planner.reconfigure(plan, lost=["a1"], joined=["b0", "b1"]), plan, {"a1"})


def check_decision(decision: Decision, plan: ExecutionPlan, lost: set[str]) -> None:
    """Everybody who trains holds its layers then, from living holders."""
    arrived = {worker: set(layers) for worker, layers in plan.layers_at.items() if worker.node not in lost}
    held = {worker: set(layers) for worker, layers in arrived.items()}
    for transfer in decision.transfers:
        assert transfer.layer in held[transfer.source]
        arrived.setdefault(transfer.target, set()).add(transfer.layer)
    assert all(layers <= arrived[worker] for worker, layers in decision.plan.layers_at.items())
    assert not lost & set(decision.plan.nodes)
