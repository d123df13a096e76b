"""Workers rebuild each plan from the one before, and are told no more than they need."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.plans import (
    WrongBase,
    apply_change,
    change_between,
    orders_of,
    shares_of,
    update_of,
)
from oobleck.control.plans.plan_delta import difference, rebuild
from oobleck.control.protocol import (
    NOTHING,
    OrderedPlan,
    PartialStep,
    PlanChange,
    PlanOrder,
    PlanUpdate,
    Segment,
    WorkerAddress,
)
from oobleck.errors import PlanningError, Unrecoverable
from oobleck.planner import (
    ExecutionPlan,
    LayerTransfer,
    Pipeline,
    Planner,
    PlannerSettings,
    WorkerId,
    device_sheet,
    estimate_profile,
    model_shape,
)
from oobleck.schedule import ScheduleKind
from oobleck.wire import FrameDecoder, encode_frame, from_builtins, to_builtins
from tests.control.journals import plan, template
from tests.examples import examples

NODES = tuple(f"node{number}.rack{number % 7}.example.org" for number in range(24))
MOST_BYTES = 4096
"""Of an order that changes a plan."""


@st.composite
def plans(draw: st.DrawFn) -> OrderedPlan:
    """Any plan: what comes after another one need not be like it."""
    nodes = draw(st.permutations(NODES))
    pipelines = []
    for size in draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)):
        taken, nodes = tuple(nodes[:size]), nodes[size:]
        pipelines.append(Pipeline(template=template(size), nodes=taken, num_microbatches=draw(st.integers(2, 9))))
    layout = ExecutionPlan(pipelines=tuple(pipelines), spares=tuple(nodes[: draw(st.integers(0, 3))]))
    generation, boundary = draw(st.integers(1, 9)), draw(st.integers(0, 3))
    count = len(pipelines)
    return OrderedPlan(
        generation=generation,
        plan=layout,
        pipeline_generations=tuple(draw(st.lists(st.integers(1, generation), min_size=count, max_size=count))),
        schedules=tuple(draw(st.lists(st.sampled_from(ScheduleKind), min_size=count, max_size=count))),
        boundary=boundary,
        partial=draw(st.just(NOTHING) | st.builds(some_of, st.just(layout), st.integers(1, 9), st.integers(1, 2))),
        num_sections=draw(st.integers(1, 2)),
    )


def some_of(layout: ExecutionPlan, generation: int, number: int) -> PartialStep:
    return PartialStep(
        microbatches=tuple(sorted(share[0] for share in shares_of(layout))),
        loss=0.5,
        num_items=3,
        generation=generation,
        number=number,
    )


@examples(200)
@given(base=plans(), ordered=plans())
def test_any_plan_is_rebuilt_from_any_other(base: OrderedPlan, ordered: OrderedPlan) -> None:
    if (base.partial.generation, base.partial.number) == (ordered.partial.generation, ordered.partial.number):
        ordered = replace(ordered, partial=NOTHING)  # one name stands for one set of microbatches
    for before in (None, base, ordered):
        delta = difference(before, ordered)
        rebuilt = rebuild(before, delta, ordered.generation)
        assert rebuilt == ordered
        assert rebuilt.id == ordered.id


@examples(50)
@given(base=plans(), other=plans(), ordered=plans())
def test_another_base_than_the_one_that_was_changed_is_found_out(
    base: OrderedPlan, other: OrderedPlan, ordered: OrderedPlan
) -> None:
    delta = difference(base, ordered)
    with pytest.raises(WrongBase):
        rebuild(None, delta, ordered.generation)
    if other.id != base.id:
        with pytest.raises(WrongBase):
            rebuild(other, delta, ordered.generation)
    with pytest.raises(WrongBase, match="digest"):
        rebuild(base, replace(delta, digest="0" * 16), ordered.generation)


def test_unequal_plans_have_unequal_names() -> None:
    one = ordered_as(plan(("a", "b"), ("c", "d")))
    others = (
        ordered_as(plan(("a", "b"), ("d", "c"))),
        ordered_as(plan(("a", "b"), ("c", "d"), spares=("e",))),
        ordered_as(plan(("a", "b"), ("c", "d"), microbatches=9)),
        replace(one, pipeline_generations=(1, 2)),
        replace(one, schedules=(ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE)),
        replace(one, boundary=1),
        replace(one, num_sections=2),
        replace(one, partial=PartialStep(microbatches=(0,), generation=1, number=1)),
    )
    assert len({one.id.digest, *(other.id.digest for other in others)}) == 1 + len(others)
    assert ordered_as(plan(("a", "b"), ("c", "d"))).id == one.id


def ordered_as(layout: ExecutionPlan, *, generation: int = 1) -> OrderedPlan:
    return update_to(layout, generation=generation).ordered


def update_to(layout: ExecutionPlan, *, generation: int = 1, **fields) -> PlanUpdate:
    usual = {
        "pipeline_generations": (generation,) * len(layout.pipelines),
        "schedules": (ScheduleKind.ONE_F_ONE_B,) * len(layout.pipelines),
        "boundary": 0,
    }
    return PlanUpdate(generation=generation, plan=layout, **(usual | fields))


# --- from plan to plan -----------------------------------------------------------------------------------------------

PLANNER = Planner(
    estimate_profile(model_shape("gpt2-medium"), device_sheet("A40"), microbatch_size=2, sequence_length=1024),
    PlannerSettings(num_microbatches=48, num_pipelines=None, fault_threshold=1),
)


class Run:
    """A master and its workers, as far as plans go: what each worker has comes from its orders alone."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.update = update_to(PLANNER.initial_plan(nodes).plan)
        self.has: dict[str, OrderedPlan] = {}
        self.order(nodes)

    def order(self, nodes: tuple[str, ...]) -> None:
        """Order the newest plan of all nodes but those that miss it; it becomes what the others have."""
        known = {ordered.generation: ordered for ordered in self.has.values()}
        bases = {WorkerId(node, 0): ordered.id for node, ordered in self.has.items()}
        workers = [WorkerId(node, 0) for node in nodes]
        decoder: FrameDecoder[PlanOrder] = FrameDecoder(PlanOrder)
        for worker_id, order in orders_of(self.update, workers, bases=bases, known=known, in_force=None):
            frame = encode_frame(order)
            (received,) = decoder.feed(frame)
            base = self.has.get(worker_id.node)
            update = update_of(base, received, worker_id)
            assert update.ordered == self.update.ordered
            assert update.moving == self.update.moving
            mine = tuple(item for item in self.update.transfers if worker_id in (item.source, item.target))
            assert update.transfers == mine
            assert base is None or len(frame) <= MOST_BYTES
            self.has[worker_id.node] = update.ordered

    def change(self, generation: int, *, lost: set[str], joined: set[str], missed: set[str]) -> None:
        """Lose nodes, take others in, and order what follows; those that miss the order are told the next one."""
        before = self.update
        decision = PLANNER.reconfigure(before.plan, lost=sorted(lost), joined=sorted(joined))
        kept = {
            each.worker_ids: number
            for each, number in zip(before.plan.pipelines, before.pipeline_generations, strict=True)
        }
        self.update = update_to(
            decision.plan,
            generation=generation,
            pipeline_generations=tuple(kept.get(each.worker_ids, generation) for each in decision.plan.pipelines),
            transfers=decision.transfers,
            moving=tuple(sorted({item.layer for item in decision.transfers})),
        )
        for node in lost:
            self.has.pop(node, None)
        nodes = (*decision.plan.nodes, *decision.plan.spares)
        self.order(tuple(node for node in nodes if node not in missed))


@examples(40)
@given(data=st.data())
def test_over_any_losses_and_joins_plans_are_rebuilt_from_what_changes(data: st.DataObject) -> None:
    run = Run(NODES[: data.draw(st.integers(8, 20))])
    for generation in range(2, 2 + data.draw(st.integers(1, 6))):
        here = {*run.update.plan.nodes, *run.update.plan.spares}
        lost = data.draw(st.sets(st.sampled_from(sorted(here)), max_size=3))
        joined = data.draw(st.sets(st.sampled_from(NODES), max_size=3)) - here
        missed = data.draw(st.sets(st.sampled_from(sorted(here)), max_size=2))
        try:
            run.change(generation, lost=lost, joined=joined, missed=missed)
        except (PlanningError, Unrecoverable):
            return


# --- names -----------------------------------------------------------------------------------------------------------


def test_nodes_that_the_base_has_are_not_named_again() -> None:
    """In an order and in the journal: a rack of thousands of nodes would else be kilobytes of names in each."""
    old, new = plan(("a", "b"), ("c", "d"), ("e", "f")), plan(("a", "b", "d"), spares=("f", "new"))
    base = ordered_as(old)
    b, f = WorkerId("b", 0), WorkerId("f", 1)
    transfers = (
        LayerTransfer(layer=1, source=f, target=b),
        LayerTransfer(layer=2, source=WorkerId("left", 0), target=b),
    )
    update = update_to(
        new, generation=2, finish=1, lost=("c", "e", "gone"), regrouped=(b, WorkerId("left", 1), f), transfers=transfers
    )
    known = {1: base}
    ((_, order),) = orders_of(update, [b], bases={b: base.id}, known=known, in_force=old)
    common, change = order.common, order.common.delta.change
    assert common.lost == (2, 4, "gone")
    assert [each.nodes for each in change.pipelines] == [((0, 2), 3)]
    assert change.spares == (5, "new")
    assert common.others_regrouped == ((1, (3, "left")),)
    assert order.transfers.peers == ((1, (3,)), (0, ("left",)))
    assert replace(update_of(base, order, b), regrouped=()) == replace(update, regrouped=())
    assert set(update_of(base, order, b).regrouped) == set(update.regrouped)


def test_a_change_that_names_known_nodes_as_they_are_is_read() -> None:
    """As in the journals of earlier versions."""
    base = ordered_as(plan(("a", "b"), ("c", "d"), spares=("e",)))
    now = ordered_as(plan(("a", "b"), ("c", "e"), spares=("d",)))
    change = change_between(base, now)
    (changed,) = change.pipelines
    earlier = replace(change, pipelines=(replace(changed, nodes=("c", "e")),), spares=("d",))
    assert earlier != change
    line = to_builtins(earlier)
    assert apply_change(base, from_builtins(PlanChange, line)) == apply_change(base, change)


def test_an_order_that_names_a_node_by_a_place_that_no_plan_has_is_not_followed() -> None:
    layout = plan(("a", "b"), ("c", "d"), spares=("e",))
    base, worker_id = ordered_as(layout), WorkerId("a", 0)
    update = update_to(plan(("a", "b"), ("c", "e")), generation=2, lost=("d",))
    ((_, order),) = orders_of(update, [worker_id], bases={worker_id: base.id}, known={1: base}, in_force=None)
    common = order.common
    change = common.delta.change
    (changed,) = change.pipelines
    for wrong in (-1, 5, (3, 3), (0, 0)):
        for broken in (
            replace(common, lost=(wrong,)),
            replace(common, others_regrouped=((0, (wrong,)),)),
            replace(common, delta=replace(common.delta, change=replace(change, spares=(wrong,)))),
            replace(
                common,
                delta=replace(common.delta, change=replace(change, pipelines=(replace(changed, nodes=("c", wrong)),))),
            ),
        ):
            with pytest.raises(WrongBase, match="that are known"):
                update_of(base, replace(order, common=broken), worker_id)
        peers = replace(order.transfers, peers=((0, (wrong,)),))
        with pytest.raises(WrongBase, match="that are known"):
            update_of(base, replace(order, transfers=peers), worker_id)


def test_an_order_of_a_whole_plan_names_nothing_by_a_base_that_the_worker_has() -> None:
    """The master does not know that plan."""
    base, worker_id = ordered_as(plan(("x", "y"), ("c", "d"))), WorkerId("c", 0)
    update = update_to(plan(("c", "d")), generation=2, lost=("x", "y"))
    ((_, order),) = orders_of(update, [worker_id], bases={}, known={1: base}, in_force=None)
    assert update_of(base, order, worker_id).lost == ("x", "y")
    with pytest.raises(WrongBase):
        update_of(base, replace(order, common=replace(order.common, lost=(0,))), worker_id)


# --- what is each worker's own ---------------------------------------------------------------------------------------


def test_an_order_has_all_of_an_update_but_what_is_of_others() -> None:
    worker_id, fields = WorkerId("a", 0), {"finish": 1, "lost": ("f",), "saves": True, "assignment_version": 3}
    regrouped = tuple(WorkerId(node, 0) for node in "bce")
    layout = plan(("a", "b"), ("c", "d"), spares=("e",))
    update = update_to(layout, generation=2, moving=(1, 2, 5), regrouped=regrouped, **fields)
    ((_, order),) = orders_of(update, [worker_id], bases={}, known={}, in_force=layout)
    assert update_of(None, order, worker_id) == update


def test_a_worker_is_told_the_segments_of_its_pipeline_alone() -> None:
    old = plan(("a", "b"), ("c", "d"), ("e", "f"))
    segments = tuple(Segment(segment=number, pipeline=number % 2, microbatches=(number,)) for number in range(4))
    update = update_to(plan(("a", "b"), ("c", "d")), generation=2, finish=1, segments=segments, lost=("e",))
    workers = [WorkerId(node, 0) for node in "abcdg"]
    told = {
        worker_id.node: update_of(None, order, worker_id).segments
        for worker_id, order in orders_of(update, workers, bases={}, known={}, in_force=old)
    }
    assert {node: [each.segment for each in mine] for node, mine in told.items()} == {
        "a": [0, 2],
        "b": [0, 2],
        "c": [1, 3],
        "d": [1, 3],
        "g": [],
    }


def test_a_worker_is_told_where_those_listen_that_became_ready_since_the_plan_that_it_has() -> None:
    first, second = (ordered_as(plan(("a", "b"), ("c", "d")), generation=number) for number in (1, 2))
    update = update_to(plan(("a", "b"), ("c", "d")), generation=3)
    workers = [WorkerId(node, 0) for node in "abc"]
    known = {each.generation: each for each in (first, second)}
    since = dict(zip("abcd", (0, 0, 1, 2), strict=True))
    addresses = [
        (number, WorkerAddress(worker_id=WorkerId(node, 0), host=node, port=9)) for node, number in since.items()
    ]
    bases = {workers[0]: first.id, workers[1]: second.id}
    orders = orders_of(update, workers, bases=bases, known=known, in_force=None, addresses=addresses)
    told = {worker_id.node: [each.host for each in order.common.addresses] for worker_id, order in orders}
    assert told == {"a": ["c", "d"], "b": ["d"], "c": ["a", "b", "c", "d"]}


def test_workers_with_the_same_base_are_told_the_same_value() -> None:
    """So it is encoded once; one that has another plan, or one that is not known any more, is told all of it."""
    first, second = (ordered_as(plan(("a", "b"), ("c", "d")), generation=number) for number in (1, 2))
    update = update_to(plan(("a", "b")), generation=3)
    workers = [WorkerId(node, 0) for node in "abcd"]
    bases = dict(zip(workers, (first.id, second.id, first.id, replace(first.id, digest="other")), strict=True))
    known = {each.generation: each for each in (first, second)}
    orders = orders_of(update, workers, bases=bases, known=known, in_force=None)
    commons = [order.common for _, order in orders]
    assert commons[0] is commons[2]
    assert [common.delta.base for common in commons] == [first.id, second.id, first.id, None]
    assert Counter(map(id, commons)).most_common(1)[0][1] == 2
