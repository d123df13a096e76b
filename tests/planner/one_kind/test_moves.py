from __future__ import annotations

from oobleck.planner.one_kind.moves import Situation, all_moves
from oobleck.planner.reconfiguration import Move


def moves(
    before: tuple[int, ...], alive: tuple[int, ...], *, free: int = 0, sizes: tuple[int, ...] = (2, 3, 4)
) -> dict[str, Move]:
    """The moves by action, when nothing better is known than pipelines of the smallest size."""
    situation = Situation(before=before, alive=alive, num_free=free, sizes=sizes)
    found = all_moves(situation, lambda num_nodes, _kept: (sizes[0],) * (num_nodes // sizes[0]))
    by_action: dict[str, Move] = {}
    for move in found:
        by_action.setdefault(move.action, move)
    return by_action


def test_a_shrunk_pipeline_goes_on() -> None:
    move = moves((3, 3), (3, 2))["reinstantiate"]
    assert move.pipelines == ((0, (3,)), (1, (2,)))
    assert move.detail == "pipeline 1 continues with 2 nodes"


def test_a_pipeline_that_is_gone_leaves_the_others() -> None:
    move = moves((2, 2, 2), (2, 0, 2))["reinstantiate"]
    assert move.pipelines == ((0, (2,)), (2, (2,)))
    assert move.detail == "the other pipelines take its microbatches"


def test_a_pipeline_below_the_smallest_size_cannot_go_on_alone() -> None:
    assert "reinstantiate" not in moves((3, 2), (3, 1))


def test_a_borrower_takes_from_the_largest() -> None:
    move = moves((4, 3, 2), (4, 3, 1))["borrow"]
    assert move.pipelines == ((0, (3,)), (1, (3,)), (2, (2,)))
    assert move.detail == "pipeline 2 borrows 1 node from pipeline 0"


def test_several_borrowers_are_named() -> None:
    move = moves((4, 4, 2, 2), (4, 4, 1, 1), sizes=(2, 3, 4))["borrow"]
    assert move.pipelines == ((0, (3,)), (1, (3,)), (2, (2,)), (3, (2,)))
    assert move.detail == "pipelines 2 and 3 borrow 2 nodes from pipelines 0 and 1"


def test_donors_at_the_minimum_give_nothing() -> None:
    assert "borrow" not in moves((2, 2), (2, 1))


def test_spares_come_before_borrowing() -> None:
    found = moves((3, 2), (3, 1), free=1)
    assert found["reinstantiate"].pipelines == ((0, (3,)), (1, (2,)))
    assert found["reinstantiate"].detail == "spares take the empty places"
    assert "borrow" not in found


def test_two_undersized_pipelines_become_one() -> None:
    move = moves((2, 2, 2), (1, 1, 2))["merge"]
    assert move.pipelines == ((1, (2,)), (2, (2,)))
    assert move.detail == "pipeline 0 merged into pipeline 1"


def test_one_undersized_pipeline_joins_the_smallest_other() -> None:
    assert moves((2, 3, 2), (1, 3, 2))["merge"].pipelines == ((1, (3,)), (2, (3,)))


def test_nobody_to_merge_with() -> None:
    assert moves((2,), (1,)) == {}


def test_free_nodes_go_to_the_smallest_pipelines() -> None:
    move = moves((3, 2), (3, 2), free=2)["absorb"]
    assert move.pipelines == ((0, (4,)), (1, (3,)))
    assert move.detail == "pipelines 0 and 1 grow"


def test_pipelines_grow_up_to_the_largest_size() -> None:
    move = moves((3, 4), (3, 4), free=3)["absorb"]
    assert move.pipelines == ((0, (4,)), (1, (4,)))
    assert move.detail == "pipeline 0 grows"


def test_nodes_of_broken_pipelines_form_new_ones_while_whole_ones_stay() -> None:
    found = all_moves(
        Situation(before=(3, 4, 4), alive=(3, 3, 1), num_free=0, sizes=(2, 3, 4)),
        lambda num_nodes, kept: (2, 2) if kept == 1 and num_nodes == 4 else (),
    )
    regroup = [move for move in found if move.action == "rebuild"]
    assert [move.pipelines for move in regroup] == [((0, (3,)), (1, (2,)), (2, (2,)))]
    assert regroup[0].detail == "the other nodes form 2 pipelines of 2 nodes"


def test_moves_that_end_alike_are_told_once_by_the_gentlest() -> None:
    assert set(moves((2, 2), (2, 2))) == {"reinstantiate"}


def test_a_rebuild_keeps_what_it_can() -> None:
    situation = Situation(before=(4, 3, 2), alive=(3, 3, 2), num_free=0, sizes=(2, 3, 4))
    rebuild = next(
        m for m in all_moves(situation, lambda _n, kept: () if kept else (2, 2, 2, 2)) if m.action == "rebuild"
    )
    assert rebuild.pipelines == ((0, (2,)), (1, (2,)), (2, (2,)), (None, (2,)))
    assert rebuild.detail == "all nodes are planned again: 4 pipelines of 2 nodes"
