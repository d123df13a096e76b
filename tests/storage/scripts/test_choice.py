"""Which state all ranks load."""

from __future__ import annotations

from typing import Literal

from oobleck.storage.scripts import Chosen, Holding, LostState, PartNote, Sharding, Source, choose, sources, state_name

CUT = Sharding(device="cpu", mesh=(2,), cut=(0,))


def holding(
    viewer: int,
    step: int,
    *,
    rank: int | None = None,
    start: str = "s1-a",
    place: Literal["memory", "disk"] = "memory",
    is_cut: bool = False,
    saved_at: str = "",
) -> Holding:
    note = PartNote(
        name=state_name(step, start),
        step=step,
        start=start,
        rank=viewer if rank is None else rank,
        world_size=2,
        number=step,
        saved_at=saved_at,
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
    assert chosen(holding(0, 7), holding(0, 8), holding(1, 6), holding(1, 7)) == (7, "s1-a", "memory")


def test_ranks_whose_node_is_lost_are_not_waited_for_where_all_have_the_same() -> None:
    assert chosen(holding(0, 7), holding(0, 8)) == (8, "s1-a", "memory")


def test_a_missing_piece_sends_all_to_the_disk() -> None:
    in_memory = [holding(0, 8, is_cut=True), holding(0, 7, is_cut=True)]
    on_disk = [holding(0, 5, rank=rank, place="disk", is_cut=True) for rank in (0, 1)]
    assert chosen(*in_memory, *on_disk) == (5, "s1-a", "disk")
    lost = choose(in_memory)
    assert isinstance(lost, LostState)
    assert "of step 8 of 2 ranks, the parts of rank 1 are neither" in lost.problem


def test_a_first_save_that_was_cut_short_is_as_none() -> None:
    assert choose([holding(0, 1, is_cut=True)]) is None


def test_a_newer_start_wins_although_it_went_back() -> None:
    """A node that was away comes back with states that the others have gone back behind."""
    assert chosen(holding(0, 5, start="s2-b"), holding(1, 5, start="s2-b"), holding(1, 9)) == (5, "s2-b", "memory")


def test_a_start_that_not_all_have_saved_in_falls_back_to_the_one_before() -> None:
    parts = [holding(0, 8), holding(0, 9, start="s2-b", is_cut=True), holding(1, 8), holding(1, 7)]
    assert chosen(*parts) == (8, "s1-a", "memory")


def test_the_same_step_is_read_from_memory() -> None:
    assert chosen(holding(0, 5, place="disk"), holding(0, 5)) == (5, "s1-a", "memory")


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


def test_no_clock_has_a_say_in_which_state_is_the_newest() -> None:
    """A start whose clocks were an hour ahead, one whose clocks are right, and one after them."""
    ahead, right = "2026-01-01T13:00:00", "2026-01-01T12:05:00"
    parts = [holding(0, 30, saved_at=ahead), holding(0, 60, start="s2-b", saved_at=right)]
    assert chosen(*parts) == (60, "s2-b", "memory")
    assert chosen(*parts, holding(0, 45, start="s3-c", saved_at=right)) == (45, "s3-c", "memory")


def test_ten_starts_are_more_than_nine() -> None:
    assert chosen(holding(0, 5, start="s10-a"), holding(0, 9, start="s9-b")) == (5, "s10-a", "memory")


def test_starts_that_have_not_seen_each_other_are_ordered_by_their_steps() -> None:
    assert chosen(holding(0, 5, start="s2-b"), holding(0, 9, start="s2-a")) == (9, "s2-a", "memory")
