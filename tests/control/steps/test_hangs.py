"""Who is accused when nobody is dead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.protocol import Status
from oobleck.control.steps.hangs import cut_off_nodes, is_network_down, stuck_workers
from oobleck.planner import WorkerId


def worker_id(index: int) -> WorkerId:
    return WorkerId(node=f"n{index}", device=0)


def status(
    *,
    waits_for: tuple[int, ...] = (),
    unreachable: tuple[int, ...] = (),
    has_come_on: bool = False,
    layers: tuple[int, ...] = (),
) -> Status:
    return Status(
        device=0,
        generation=2,
        applied=1,
        last_record=None,
        reduced=None,
        adopted=1,
        layers=layers,
        microbatches_done=0,
        broken=False,
        waits_for=tuple(map(worker_id, waits_for)),
        unreachable=tuple(map(worker_id, unreachable)),
        has_come_on=has_come_on,
    )


def test_the_one_that_all_wait_for_is_stuck():
    statuses = {worker_id(0): status(waits_for=(1,)), worker_id(1): status(), worker_id(2): status(waits_for=(0, 1, 3))}
    statuses[worker_id(3)] = status(waits_for=(0, 1, 2))
    assert stuck_workers(statuses) == (worker_id(1),)


def test_who_computes_and_is_not_waited_for_is_not_stuck():
    assert stuck_workers({worker_id(0): status(), worker_id(1): status()}) == ()


def test_the_slow_are_not_stuck():
    statuses = {worker_id(0): status(waits_for=(1, 2)), worker_id(1): status(), worker_id(2): status(has_come_on=True)}
    assert stuck_workers(statuses) == (worker_id(1),)


def test_who_uses_the_processor_is_not_stuck():
    statuses = {worker_id(0): status(waits_for=(1, 2)), worker_id(1): status(), worker_id(2): status()}
    assert stuck_workers(statuses, busy=[worker_id(2)]) == (worker_id(1),)


def test_nobody_is_stuck_when_all_wait():
    assert stuck_workers({worker_id(0): status(waits_for=(1,)), worker_id(1): status(waits_for=(0,))}) == ()


def test_of_two_that_do_not_reach_each_other_one_goes():
    statuses = {worker_id(0): status(), worker_id(1): status(unreachable=(2,)), worker_id(2): status(unreachable=(1,))}
    assert cut_off_nodes(statuses) == ("n2",)


def test_the_node_that_nobody_reaches_goes():
    statuses = {worker_id(index): status(unreachable=(0,)) for index in (1, 2, 3)} | {worker_id(0): status()}
    assert cut_off_nodes(statuses) == ("n0",)


def test_who_did_not_answer_accuses_nobody_and_is_not_accused():
    assert cut_off_nodes({worker_id(0): status(unreachable=(7,)), worker_id(1): status()}) == ()


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7))))
def test_those_that_are_left_all_reach_each_other(pairs: set[tuple[int, int]]):
    cut = {(one, other) for one, other in pairs if one != other}
    statuses = {
        worker_id(index): status(unreachable=tuple(sorted(other for one, other in cut if one == index)))
        for index in range(8)
    }
    gone = cut_off_nodes(statuses)
    assert all(f"n{one}" in gone or f"n{other}" in gone for one, other in cut)
    assert bool(gone) == bool(cut)


def holding(*layers: tuple[int, ...]) -> dict[WorkerId, Status]:
    return {worker_id(index): status(layers=held) for index, held in enumerate(layers)}


def test_more_nodes_than_may_be_lost_are_not_lost_by_a_cut_network():
    copies = holding((0, 1), (0, 1), (0, 1), (0, 1))
    assert not is_network_down(copies, ("n3",), 1)
    assert is_network_down(copies, ("n2", "n3"), 1)
    assert not is_network_down(copies, ("n2", "n3"), 2)


def test_the_last_copy_of_a_layer_is_not_lost_by_a_cut_network():
    assert is_network_down(holding((0, 1), (2, 3), (0, 1)), ("n1",), 1)
    assert not is_network_down(holding((0, 1), (2, 3), (0, 1, 2, 3)), ("n1",), 1)


def test_nodes_that_hold_nothing_may_go_however_many():
    assert not is_network_down(holding((0,), (0,), (), (), ()), ("n2", "n3", "n4"), 1)


def test_before_anybody_holds_a_layer_each_node_counts():
    assert is_network_down(holding((), (), ()), ("n1", "n2"), 1)
    assert not is_network_down(holding((), (), ()), ("n2",), 1)


def test_where_all_reach_each_other_the_network_is_well():
    assert not is_network_down(holding((0,), (1,)), (), 0)
