"""Which checkpoint is gone back to."""

from __future__ import annotations

from oobleck.control.checkpoints.restoring import Restoring
from oobleck.control.events import Record, Send, Turn
from oobleck.control.journal import Notice
from oobleck.control.protocol import CheckpointsFound, FindCheckpoints, FoundState
from oobleck.planner import WorkerId

A, B = WorkerId(node="a", device=0), WorkerId(node="b", device=0)
RUN = "0000000a"


def state(
    step: int, layers: tuple[int, ...], *, run: str = RUN, at: int | None = None, generation: int = 1, **more
) -> FoundState:
    fields = {"in_memory": False, "directory": None} | more
    return FoundState(
        name=f"step-{step:08d}.{run}.{generation}",
        run=run,
        step=step,
        saved_at=f"2026-01-{at or step:02d}",
        layers=layers,
        **fields,
    )


def asked(a: list[FoundState], b: list[FoundState], *, directory: str | None = None, **more) -> Restoring:
    restoring = Restoring(run=RUN, directory=directory)
    answer(restoring, a, b, **more)
    return restoring


def answer(restoring: Restoring, a: list[FoundState], b: list[FoundState], *, request: int = 1, **more) -> None:
    """Ask both, for the time that `request` says, and have them answer."""
    restoring.ask(Turn(0.0), [A, B])
    fields = {"problems": (), "unfinished": ()} | more
    for worker_id, found in ((A, a), (B, b)):
        message = CheckpointsFound(device=0, request=request, found=tuple(found), **fields)
        restoring.found(worker_id, message)


def test_the_newest_that_is_whole_is_taken() -> None:
    restoring = asked([state(1, (0, 1)), state(2, (0, 1)), state(3, (0,))], [])
    assert restoring.newest(2).step == 2


def test_what_several_see_is_put_together() -> None:
    candidate = asked([state(3, (0,))], [state(3, (1,), in_memory=True)]).newest(2)
    assert candidate.held == {A: frozenset({0}), B: frozenset({1})}


def test_newest_means_saved_last_not_furthest() -> None:
    restoring = asked([state(9, (0,), run="0000000b", at=1), state(2, (0,), at=5)], [])
    assert restoring.newest(1).step == 2


def test_a_clock_has_no_say_within_a_run() -> None:
    """A node whose clock is ahead has saved step 3; then a generation has gone back to step 2, and saved step 4."""
    ahead = state(3, (0,), at=20)
    assert asked([ahead, state(5, (0,), at=5)], []).newest(1).step == 5
    assert asked([state(9, (0,), at=20), state(4, (0,), at=5, generation=2)], []).newest(1).step == 4


def test_a_run_is_newer_than_the_one_that_it_continues_from_whatever_clocks_say() -> None:
    first = [state(step, (0,), run="0000000b", at=20 + step) for step in (3, 6)]
    later = state(5, (0,), at=1, origin=first[0].name)
    assert asked([*first, later], []).newest(1).step == 5
    last = state(4, (0,), run="0000000c", at=1, origin=later.name)
    assert asked([*first, later, last], []).newest(1).step == 4


def test_a_circle_of_origins_ends() -> None:
    one = state(3, (0,), run="0000000b", origin=state(4, ()).name)
    assert asked([one, state(4, (0,), origin=one.name)], []).newest(1) is not None


def test_a_broken_one_is_left_out_and_the_one_before_taken() -> None:
    restoring = asked([state(1, (0,)), state(2, (0,))], [])
    restoring.note_broken(restoring.newest(1).name)
    assert restoring.newest(1).step == 1
    restoring.note_broken(restoring.newest(1).name)
    assert restoring.newest(1) is None


def test_a_run_goes_back_to_its_own_past_alone() -> None:
    """A run that began anew has nothing to do with what lies in its directory from before."""
    old = state(9, (0,), run="0000000b", at=20)
    restoring = asked([old], [])
    assert restoring.newest_of_this_run(1) is None
    answer(restoring, [old, state(4, (0,), at=21)], [], request=2)
    assert restoring.newest_of_this_run(1).step == 4


def test_the_past_of_a_run_that_was_resumed_is_what_it_was_resumed_from() -> None:
    old = [state(step, (0,), run="0000000b") for step in (3, 6, 9)]
    restoring = asked(old, [])
    restoring.note_broken(old[2].name)
    restoring.begin_from(restoring.newest(1).name)
    answer(restoring, old, [], request=2)
    assert restoring.newest_of_this_run(1).step == 6


def test_what_earlier_runs_saved_on_another_course_is_not_the_past() -> None:
    """The run continues from b:5, which continued from c:3: neither c:4 nor d:1 led to it, though both are older."""
    c = [state(step, (0,), run="0000000c", at=step) for step in (3, 4)]
    d = state(1, (0,), run="0000000d", at=5)
    b = state(5, (0,), run="0000000b", at=6, origin=c[0].name)
    restoring = asked([*c, d, b], [])
    restoring.begin_from(restoring.newest(1).name)
    restoring.note_broken(b.name)
    answer(restoring, [*c, d, b], [], request=2)
    assert restoring.newest_of_this_run(1).name == c[0].name


def test_where_the_user_says_a_place_nothing_else_counts() -> None:
    elsewhere = state(2, (0,), at=1, directory="/there")
    restoring = asked([state(5, (0,)), elsewhere], [], directory="/there")
    assert restoring.newest(1).restore.directory == "/there"
    assert asked([state(5, (0,))], [], directory="/there").newest(1) is None


def test_all_who_matter_must_have_answered_the_newest_question() -> None:
    restoring = Restoring(run=RUN, directory=None)
    assert not restoring.is_answered([A, B])
    restoring.ask(Turn(0.0), [A, B])
    late = CheckpointsFound(device=0, request=1, found=(), problems=(), unfinished=())
    restoring.found(A, late)
    assert restoring.is_answered([A])
    assert not restoring.is_answered([A, B])
    restoring.ask(Turn(0.0), [A, B])
    restoring.found(B, late)
    assert restoring.is_asked([A, B])
    assert not restoring.is_answered([B])


def test_each_worker_is_asked() -> None:
    turn = Turn(0.0)
    Restoring(run=RUN, directory="/there").ask(turn, [B, A])
    sent = [(send.node, send.message) for send in turn.commands if isinstance(send, Send)]
    assert sent == [(node, FindCheckpoints(device=0, request=1, directory="/there")) for node in ("a", "b")]


def test_problems_are_told_once() -> None:
    restoring = asked([], [], problems=("x is broken",), unfinished=("step-00000007.r.1",))
    turn = Turn(7.0)
    restoring.report_problems(turn)
    (record,) = turn.commands
    assert isinstance(record, Record)
    assert isinstance(record.entry, Notice)
    assert (record.entry.t_s, record.entry.level) == (7.0, "warning")
    assert "x is broken" in record.entry.text
    restoring.report_problems(turn)
    assert turn.commands == [record]
    assert restoring.unfinished(None, is_private=True) == ("step-00000007.r.1",)
    assert restoring.unfinished(None, is_private=False) == ()
