"""Which state all ranks load."""

from __future__ import annotations

from typing import Literal

from oobleck.checkpoint.scripts import (
    Chosen,
    Holding,
    LostState,
    PartNote,
    Sharding,
    Source,
    choose,
    sources,
    state_name,
)

CUT = Sharding(device="cpu", mesh=(2,), cut=(0,))


def holding(
    viewer: int,
    step: int,
    *,
    rank: int | None = None,
    start: str = "a",
    place: Literal["memory", "disk"] = "memory",
    is_cut: bool = False,
) -> Holding:
    note = PartNote(
        name=state_name(step, start),
        step=step,
        start=start,
        rank=viewer if rank is None else rank,
        world_size=2,
        number=step,
        saved_at=f"{start}{step:04d}",
        is_planned=False,
        shardings=(CUT,) if is_cut else (),
    )
    return Holding(viewer=viewer, place=place, note=note)


def chosen(*holdings: Holding) -> tuple[int, str, str] | None:
    found = choose(holdings)
    assert not isinstance(found, LostState)
    return None if found is None else (found.note.step, found.note.start, found.place)


def test_nothing_is_chosen_where_nothing_was_saved() -> None:
    assert choose([]) is None


def test_the_newest_step_that_all_have_is_chosen() -> None:
    assert chosen(holding(0, 7), holding(0, 8), holding(1, 6), holding(1, 7)) == (7, "a", "memory")


def test_ranks_whose_node_is_lost_are_not_waited_for_where_all_have_the_same() -> None:
    assert chosen(holding(0, 7), holding(0, 8)) == (8, "a", "memory")


def test_a_missing_piece_sends_all_to_the_disk() -> None:
    in_memory = [holding(0, 8, is_cut=True), holding(0, 7, is_cut=True)]
    on_disk = [holding(0, 5, rank=rank, place="disk", is_cut=True) for rank in (0, 1)]
    assert chosen(*in_memory, *on_disk) == (5, "a", "disk")
    lost = choose(in_memory)
    assert isinstance(lost, LostState)
    assert "of step 8, saved by 2 ranks, those of rank 1 can be found neither" in lost.problem


def test_a_first_save_that_was_cut_short_is_as_none() -> None:
    assert choose([holding(0, 1, is_cut=True)]) is None


def test_a_newer_start_wins_although_it_went_back() -> None:
    """A node that was away comes back with states that the others have gone back behind."""
    assert chosen(holding(0, 5, start="b"), holding(1, 5, start="b"), holding(1, 9)) == (5, "b", "memory")


def test_a_start_that_not_all_have_saved_in_falls_back_to_the_one_before() -> None:
    parts = [holding(0, 8), holding(0, 9, start="b", is_cut=True), holding(1, 8), holding(1, 7)]
    assert chosen(*parts) == (8, "a", "memory")


def test_the_same_step_is_read_from_memory() -> None:
    assert chosen(holding(0, 5, place="disk"), holding(0, 5)) == (5, "a", "memory")


def test_a_rank_reads_its_own_part_then_one_of_its_node_then_asks() -> None:
    state = choose([holding(0, 5), holding(0, 5, rank=1), holding(1, 5), holding(2, 5, rank=1)])
    assert isinstance(state, Chosen)
    assert sources(state, rank=1, world_size=2)[0] == Source(1, 1)
    assert sources(state, rank=1, world_size=4)[0] == Source(1, 1)
    assert sources(state, rank=2, world_size=4)[0] == Source(1, 2)
    assert sources(state, rank=3, world_size=4)[0] == Source(0, 0)


def test_a_moved_rank_gets_its_own_part_from_who_can_read_it() -> None:
    state = choose([holding(0, 5), holding(0, 5, rank=1)])
    assert isinstance(state, Chosen)
    assert sources(state, rank=1, world_size=2)[0] == Source(1, 0)


def test_every_piece_has_one_source() -> None:
    state = choose([holding(0, 5, is_cut=True), holding(1, 5, is_cut=True)])
    assert isinstance(state, Chosen)
    assert sources(state, rank=2, world_size=3)[1] == {(0, (0,)): Source(0, 0), (0, (1,)): Source(1, 1)}
