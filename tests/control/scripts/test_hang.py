"""Whether ranks hang, and which holds the others up."""

from __future__ import annotations

from oobleck.control.protocol import GroupRecord, RanksQuiet, RankStacks
from oobleck.control.scripts.hang import HangWatch, Missing, find_missing, hung_rank

SLEEPING = """\
Thread 0x00007f00 (most recent call first):
  File "/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f01 (most recent call first):
  File "/home/me/train.py", line 12 in load_batch
  File "/home/me/train.py", line 30 in <module>
"""
WAITING = """\
Current thread 0x00007f01 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/lib/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/home/me/train.py", line 31 in <module>
"""


def quiet(*idle: int, has_shown: bool = True, is_quiet: bool = True) -> RanksQuiet:
    return RanksQuiet(generation=1, is_quiet=is_quiet, has_shown=has_shown, idle=idle)


def watch(**said: RanksQuiet) -> HangWatch:
    watching = HangWatch()
    for node, each in said.items():
        watching.hear(node, each)
    return watching


def test_ranks_that_have_never_shown_a_sign_have_none_to_miss() -> None:
    assert not watch(a=quiet(0, has_shown=False)).suspects(["a"])


def test_all_nodes_must_be_quiet_and_one_rank_must_wait() -> None:
    assert watch(a=quiet(0), b=quiet()).suspects(["a", "b"])
    assert not watch(a=quiet(0), b=quiet(is_quiet=False)).suspects(["a", "b"])
    assert not watch(a=quiet(0)).suspects(["a", "b"]), "b has said nothing yet"
    assert not watch(a=quiet(), b=quiet()).suspects(["a", "b"]), "all compute"
    assert not watch(a=quiet(0)).suspects([]), "all have ended"


def test_one_node_that_has_printed_speaks_for_all() -> None:
    assert watch(a=quiet(has_shown=True), b=quiet(3, has_shown=False)).suspects(["a", "b"])


def test_all_nodes_must_have_sent_their_stacks() -> None:
    watching = watch(a=quiet(0), b=quiet(1))
    watching.answer("a", RankStacks(generation=1, stacks=((0, WAITING),)))
    assert not watching.has_stacks_of(["a", "b"])
    watching.answer("b", RankStacks(generation=1, stacks=((1, SLEEPING),)))
    assert watching.has_stacks_of(["a", "b"])
    found = watching.finding(t_s=1.0, generation=1, quiet_s=60.0)
    assert (found.num_waiting, [each.rank for each in found.culprits]) == (1, [1]), "rank 0 waits for it"


def test_a_sign_of_life_takes_all_back() -> None:
    watching = watch(a=quiet(0))
    watching.answer("a", RankStacks(generation=1, stacks=((0, WAITING),)))
    watching.hear("a", quiet(is_quiet=False))
    assert not watching.suspects(["a"])
    assert not watching.has_stacks_of(["a"])


def test_a_rank_is_where_the_innermost_frame_of_the_script_is() -> None:
    found = hung_rank("node1", 3, SLEEPING)
    assert (found.place, found.is_waiting) == ("/home/me/train.py:12 in load_batch", False)
    found = hung_rank("node1", 3, WAITING)
    assert (found.place, found.is_waiting) == ("/home/me/train.py:31 in <module>", True)
    found = hung_rank("node1", 3, "")
    assert (found.place, found.is_waiting) == ("", False)


def record(group: str, ranks: tuple[int, ...], num_joined: int, *, waits: bool = False) -> GroupRecord:
    return GroupRecord(group=group, ranks=ranks, num_joined=num_joined, what="gloo:all_reduce", is_waiting=waits)


def test_flight_recorders_name_the_rank_that_has_not_joined_even_where_all_seem_to_wait():
    """Rank 0 waits for both others, and rank 1 for rank 2, which waits for a message that is never sent."""
    everyone, two = (0, 1, 2), (1, 2)
    records = {
        0: (record("0", everyone, 4, waits=True),),
        1: (record("0", everyone, 3), record("1", two, 1, waits=True)),
        2: (record("0", everyone, 3), record("1", two, 0)),
    }
    found = find_missing(records)
    assert found == Missing(what="collective 1 (gloo:all_reduce) of group 1", ranks=(2,), num_waiting=1)


def test_flight_recorders_name_nobody_who_has_none_nor_a_group_that_is_not_waited_in():
    everyone = (0, 1)
    assert find_missing({}) is None
    assert find_missing({0: (record("0", everyone, 4, waits=True),)}) is None
    assert find_missing({0: (record("0", everyone, 4),), 1: (record("0", everyone, 3),)}) is None
    assert find_missing({0: (record("0", everyone, 4, waits=True),), 1: ()}) == Missing(
        what="collective 4 (gloo:all_reduce) of group 0", ranks=(1,), num_waiting=1
    )
