from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import Action, JobEnded, JournalEntry, LossCause, PlanCause, RecoveryStarted, StepsSaved
from oobleck.control.journal.goodput import TimeAccount, TimeSplit
from tests.control.journals import adopted, committed, job_started, plan, recovered, run_with_a_loss

TWO = plan(("node0", "node1"), ("node2", "node3"))
ONE = plan(("node0", "node1"))
NONE = plan()


def account_of(*entries: JournalEntry) -> TimeAccount:
    account = TimeAccount()
    for entry in entries:
        account.apply(entry)
    return account


def losing(t_s: float, generation: int = 2) -> RecoveryStarted:
    return RecoveryStarted(
        t_s=t_s, generation=generation, nodes=("node3",), cause=PlanCause.LOSS, loss=LossCause.CONNECTION_LOST
    )


def test_the_time_before_the_first_step_is_starting():
    account = account_of(adopted(4.0, 1, TWO), committed(10.0, 1, duration_s=1.0))
    assert account.at(10.0) == TimeSplit(starting_s=9.0, useful_s=1.0)
    assert account.at(10.0).goodput == 0.1


def test_time_before_any_entry_is_starting():
    assert TimeAccount().at(3.0) == TimeSplit(starting_s=3.0)
    assert TimeAccount().at(0.0).goodput == 0.0


def test_the_step_in_flight_counts_as_useful():
    account = account_of(committed(1.0, 1, duration_s=1.0))
    assert account.at(1.5) == TimeSplit(useful_s=1.5)


@pytest.mark.parametrize("done_first", [True, False])
def test_a_recovery_takes_its_stall_from_the_step_it_interrupted(done_first):
    start = [committed(1.0, 1, duration_s=1.0), losing(1.5)]
    end = [recovered(3.0, 2, "node3", stall_s=0.25), committed(3.0, 2, 2, duration_s=2.0)]
    account = account_of(*start, *(end if done_first else end[::-1]))
    assert account.at(3.0) == TimeSplit(useful_s=2.75, reconfiguring_s=0.25)
    assert account.at(4.0) == TimeSplit(useful_s=3.75, reconfiguring_s=0.25)


def test_while_a_recovery_lasts_all_its_time_is_reconfiguring():
    account = account_of(committed(1.0, 1, duration_s=1.0), losing(1.5))
    assert account.at(2.5) == TimeSplit(useful_s=1.5, reconfiguring_s=1.0)


def test_a_stall_longer_than_the_step_is_cut_to_it():
    account = account_of(
        committed(1.0, 1, duration_s=1.0), losing(1.5), committed(2.0, 2, 2), recovered(2.0, 2, "node3", stall_s=9.0)
    )
    assert account.at(2.0) == TimeSplit(useful_s=1.0, reconfiguring_s=1.0)


def test_a_stall_goes_on_into_the_steps_of_the_recovery():
    account = account_of(
        committed(1.0, 1, duration_s=1.0),
        losing(1.9),
        committed(2.0, 2, 1),
        committed(4.0, 3, 2),
        recovered(4.0, 2, "node3", stall_s=1.5),
    )
    assert account.at(4.0) == TimeSplit(useful_s=2.5, reconfiguring_s=1.5)


def test_an_older_recovery_that_ends_leaves_the_newer_one_open():
    account = account_of(
        committed(1.0, 1, duration_s=1.0), losing(1.5, 2), losing(1.6, 3), recovered(2.0, 2, "node3", stall_s=0.1)
    )
    assert account.at(2.6) == TimeSplit(useful_s=1.6, reconfiguring_s=1.0)


def test_a_step_that_is_committed_again_is_redone_time():
    account = account_of(committed(1.0, 1, duration_s=1.0), committed(2.0, 2), committed(3.0, 2), committed(4.0, 3))
    assert account.at(4.0) == TimeSplit(useful_s=3.0, redone_s=1.0)


def test_a_plan_slower_than_the_best_is_degraded_time():
    slow = adopted(0.0, 1, ONE, predicted_step_s=0.4, best_step_s=0.3)
    account = account_of(slow, committed(1.0, 1, duration_s=1.0))
    split = account.at(1.0)
    assert split.degraded_s == pytest.approx(0.25)
    assert split.useful_s == pytest.approx(0.75)


def test_joining_costs_what_the_step_does_not_explain():
    joined = adopted(1.0, 2, TWO, Action.ABSORB)
    account = account_of(committed(1.0, 1, duration_s=1.0), joined, committed(2.5, 2, 2, duration_s=1.0))
    assert account.at(2.5) == TimeSplit(useful_s=2.0, reconfiguring_s=0.5)


def test_time_without_a_plan_is_idle():
    waiting = adopted(2.0, 2, NONE, reason="too few nodes")
    account = account_of(committed(1.0, 1, duration_s=1.0), losing(1.5), waiting)
    assert account.at(5.0) == TimeSplit(useful_s=1.5, reconfiguring_s=0.5, idle_s=3.0)
    account.apply(adopted(6.0, 3, TWO))
    account.apply(committed(7.5, 2, 3, duration_s=1.0))
    assert account.at(7.5) == TimeSplit(useful_s=2.5, reconfiguring_s=1.0, idle_s=4.0)


def test_the_time_after_the_last_commit_is_stopping():
    account = account_of(committed(1.0, 1, duration_s=1.0), JobEnded(t_s=1.5, exit_code=0, reason="done"))
    assert account.at(1.5) == TimeSplit(useful_s=1.0, stopping_s=0.5)
    assert account.at(99.0) == account.at(1.5)


def test_a_recovery_that_never_ends_is_reconfiguring_to_the_end():
    account = account_of(
        committed(1.0, 1, duration_s=1.0), losing(1.5), JobEnded(t_s=4.0, exit_code=75, reason="too few nodes")
    )
    assert account.at(4.0) == TimeSplit(useful_s=1.0, stopping_s=0.5, reconfiguring_s=2.5)


def test_a_run_with_a_loss_adds_up():
    entries = list(run_with_a_loss())
    split = account_of(*entries).at(entries[-1].t_s)
    assert split.elapsed_s == pytest.approx(entries[-1].t_s)
    assert split.reconfiguring_s == 0.05
    assert split.stopping_s == pytest.approx(0.5)


def saved(t_s: float, first_step: int, step: int, worked_s: float, *, generation: int = 1) -> StepsSaved:
    return StepsSaved(t_s=t_s, generation=generation, first_step=first_step, step=step, worked_s=worked_s, loss=None)


def test_of_a_script_the_steps_that_it_saves_are_useful_what_a_restart_costs_is_not_nor_what_is_done_again():
    """It computes for 3 s what it never saves, is back 2 s later, and saves steps 9 and 10 again."""
    before = account_of(saved(10.0, 1, 10, 8.0))
    assert before.at(10.0) == TimeSplit(starting_s=2.0, useful_s=8.0)
    after = account_of(saved(10.0, 1, 10, 8.0), saved(19.0, 9, 12, 4.0, generation=2))
    assert after.at(19.0) == TimeSplit(starting_s=2.0, useful_s=10.0, redone_s=2.0, reconfiguring_s=5.0)
    assert after.at(20.0).useful_s == 11.0


@st.composite
def journals(draw: st.DrawFn) -> list[JournalEntry]:
    """Any entries in any order, at times that never go back."""
    entries: list[JournalEntry] = [job_started(("node0", "node1", "node2", "node3"))]
    now_s, generation, step = 0.0, 1, 0
    for kind in draw(st.lists(st.sampled_from("ccccclrpjwe"), max_size=30)):
        now_s += draw(st.floats(0, 10))
        seconds = st.floats(0, 20)
        match kind:
            case "c":
                step = max(1, step + draw(st.sampled_from((1, 1, 1, 2, 0, -1))))
                entries.append(committed(now_s, step, generation, duration_s=draw(seconds)))
            case "l":
                generation += 1
                entries.append(losing(now_s, generation))
            case "r":
                entries.append(recovered(now_s, draw(st.integers(1, generation)), "node3", stall_s=draw(seconds)))
            case "p":
                entries.append(adopted(now_s, generation, ONE, best_step_s=draw(st.none() | st.floats(0, 1))))
            case "j":
                entries.append(adopted(now_s, generation, TWO, Action.ABSORB))
            case "w":
                entries.append(adopted(now_s, generation, NONE))
            case "e":
                entries.append(JobEnded(t_s=now_s, exit_code=1, reason="failed"))
                break
    return entries


@given(journals(), st.floats(0, 10))
def test_the_states_partition_the_elapsed_time(entries, later_s):
    account = TimeAccount()
    for entry in entries:
        account.apply(entry)
        split = account.at(entry.t_s)
        assert split.elapsed_s == pytest.approx(entry.t_s, abs=1e-9)
        assert min(split.useful_s, *split.downtime_s.values()) >= -1e-9
    if not isinstance(entries[-1], JobEnded):
        assert account.at(entry.t_s + later_s).elapsed_s == pytest.approx(entry.t_s + later_s, abs=1e-9)
