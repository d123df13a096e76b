"""Failures explained: every finding is told once, the root first, with what was done about it and what it cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal.diagnosis import (
    LEFT_OUT_WORDS,
    TERMINATION_WORDS,
    Failure,
    Incident,
    diagnose,
    failure_of_exit,
)
from oobleck.control.journal.entries import (
    Action,
    Cause,
    HangExplained,
    JobEnded,
    JournalEntry,
    MasterResumed,
    NodeLost,
    Notice,
    PaceChanged,
    RecoveryStarted,
    WorkerDown,
)
from oobleck.control.protocol.messages import UNSEEN_WORDS
from oobleck.planner import WorkerId
from tests.control.journals import adopted, committed, plan, recovered, run_with_a_loss

START = adopted(4.0, 1, plan(("a", "b"), ("c", "d")))


def lost(t_s: float, node: str, cause: Cause = Cause.CONNECTION_LOST, evidence: str = "its connection was lost"):
    return NodeLost(t_s=t_s, node=node, cause=cause, evidence=evidence)


def down(t_s: float, node: str, reason: str = "killed by signal 9"):
    return WorkerDown(t_s=t_s, node=node, device=0, pid=8, reason=reason)


def recovering(t_s: float, generation: int, *nodes: str, cause: Cause = Cause.CONNECTION_LOST):
    return RecoveryStarted(t_s=t_s, generation=generation, nodes=nodes, cause=cause)


def only(*entries: JournalEntry) -> Incident:
    (incident,) = diagnose([START, *entries])
    return incident


def test_a_run_without_failures_has_nothing_to_tell():
    assert diagnose([START, committed(5.0, 1), JobEnded(t_s=6.0, exit_code=0, reason="done")]) == ()


def test_the_loss_of_a_node_is_told_with_its_cost():
    (incident,) = diagnose(run_with_a_loss())
    assert incident.root.failure is Failure.CONTACT_LOST
    assert incident.root.node == "node3"
    assert incident.lost == ("node3",)
    assert incident.stall_s == 0.05
    assert incident.microbatches_redone == 4
    assert incident.bytes_moved == 28_000_000
    assert "pipeline 1 cannot go on alone; its microbatches go to the others" in incident.actions
    assert incident.ended_s is not None
    assert not incident.is_fatal


@pytest.mark.parametrize(
    ("reason", "failure"),
    [
        ("killed by signal 9", Failure.KILLED),
        ("killed by signal 15", Failure.KILLED),
        ("killed by signal 11", Failure.CRASHED),
        ("killed by signal 6", Failure.CRASHED),
        ("exit code 3", Failure.EXITED),
        (UNSEEN_WORDS, Failure.EXITED),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", Failure.OUT_OF_MEMORY),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", Failure.OUT_OF_MEMORY),
        ("MemoryError", Failure.OUT_OF_MEMORY),
        ("RuntimeError: [../gloo/transport/tcp/pair.cc] Connection closed by peer", Failure.PEER),
        ("oobleck.errors.ConfigError: data.paths: no text file in /data", Failure.DATA_ERROR),
        ("ValueError: shapes do not fit", Failure.USER_EXCEPTION),
        ("AttributeError: 'Batch' has no attribute 'data.x'", Failure.USER_EXCEPTION),
        ("Traceback (most recent call last):\n  File x\nKeyError: 'gloo'\nMemoryError: ", Failure.OUT_OF_MEMORY),
        ("", Failure.USER_EXCEPTION),
    ],
)
def test_what_ended_a_process_is_read_from_its_last_words(reason, failure):
    assert failure_of_exit(reason) is failure


def test_a_silent_node_froze_when_it_was_last_heard_of():
    incident = only(lost(20.0, "b", Cause.LEASE_EXPIRED, "not heard of for 3.0 s"), recovering(20.0, 2, "b"))
    assert incident.root.failure is Failure.FROZEN
    assert incident.root.t_s == 17.0


def test_a_step_between_the_notice_of_a_frozen_node_and_its_recovery_changes_nothing():
    frozen = lost(20.0, "b", Cause.LEASE_EXPIRED, "not heard of for 3.0 s")
    incident = only(frozen, committed(20.1, 9), recovering(20.2, 2, "b"), recovered(20.4, 2, "b", stall_s=0.3))
    assert incident.stall_s == 0.3


def test_the_root_comes_first_even_when_a_peer_complained_before():
    incident = only(
        down(10.0, "a", "RuntimeError: Connection closed by peer"),
        lost(10.1, "b"),
        recovering(10.1, 2, "a", "b"),
        recovered(10.4, 2, "a", "b"),
    )
    assert (incident.root.node, incident.root.failure) == ("b", Failure.CONTACT_LOST)
    assert [finding.node for finding in incident.consequences] == ["a"]


def test_a_node_that_froze_is_the_root_of_what_its_peers_met_before_it_was_noticed():
    incident = only(
        recovering(12.0, 2, cause=Cause.PEER_FAILED),
        lost(13.0, "c", Cause.LEASE_EXPIRED, "not heard of for 3.0 s"),
        recovered(13.2, 2, "c"),
    )
    assert incident.root.node == "c"
    assert [finding.failure for finding in incident.consequences] == [Failure.PEER]


def test_a_recovery_that_another_loss_overtakes_is_one_incident():
    incident = only(
        lost(10.0, "a"),
        recovering(10.0, 2, "a"),
        lost(10.05, "c"),
        recovered(10.05, 2, "a", stall_s=0.05),
        recovering(10.05, 3, "c"),
        adopted(10.1, 3, plan(("b", "d")), Action.MERGE, reason="pipelines merge"),
        recovered(10.3, 3, "c", stall_s=0.2, steps_lost=1),
    )
    assert incident.lost == ("a", "c")
    assert incident.stall_s == pytest.approx(0.25)
    assert incident.steps_lost == 1
    assert "pipelines merge" in incident.actions


def test_losses_with_time_between_them_are_incidents_of_their_own():
    entries = [lost(10.0, "a"), recovering(10.0, 2, "a"), recovered(10.2, 2, "a")]
    entries += [lost(11.0, "b"), recovering(11.0, 3, "b"), recovered(11.2, 3, "b")]
    assert [incident.root.node for incident in diagnose([START, *entries])] == ["a", "b"]


def test_a_spare_that_is_lost_is_no_part_of_the_next_loss():
    first, second = diagnose([START, lost(10.0, "spare"), lost(30.0, "a"), recovering(30.0, 2, "a")])
    assert (first.root.node, first.ended_s) == ("spare", 10.0)
    assert (second.root.node, second.ended_s) == ("a", None)


def test_a_node_that_joins_is_no_failure():
    assert diagnose([START, recovering(9.0, 2, "e", cause=Cause.JOINED), recovered(9.1, 2, "e")]) == ()


def test_a_hang_and_a_failed_collective_without_a_culprit_are_told():
    hang = only(recovering(20.0, 2, cause=Cause.HANG), recovered(20.5, 2))
    assert hang.root.failure is Failure.HANG
    assert only(recovering(20.0, 2, cause=Cause.PEER_FAILED), recovered(20.5, 2)).root.failure is Failure.PEER


def test_the_worker_that_all_wait_for_is_the_root_of_a_hang():
    stuck = WorkerId(node="b", device=0)
    explained = HangExplained(t_s=20.6, generation=2, cut_off=(), stuck=(stuck,), stacks=((stuck, "model.py: sleep"),))
    hung = recovering(20.0, 2, cause=Cause.HANG)
    incident = only(hung, explained, lost(20.7, "b", Cause.HANG, "all wait for it"), recovered(21.0, 2, "b"))
    assert (incident.root.failure, incident.root.node) == (Failure.STUCK, "b")
    assert "model.py: sleep" in incident.root.evidence


def test_a_node_that_does_not_reach_its_peers_is_the_root_of_a_hang():
    explained = HangExplained(t_s=20.6, generation=2, cut_off=("c",), stuck=(), stacks=())
    incident = only(recovering(20.0, 2, cause=Cause.HANG), explained, lost(20.7, "c", Cause.CUT_OFF), recovered(21, 2))
    assert (incident.root.failure, incident.root.node) == (Failure.CUT_OFF, "c")
    assert incident.lost == ("c",)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told_once(loss):
    incident = only(committed(5.0, 1), committed(6.0, 2, loss=loss), committed(7.0, 3, loss=loss), committed(20.0, 4))
    assert incident.root.failure is Failure.BAD_LOSS
    assert "step 2" in incident.root.evidence


def test_a_notice_of_termination_and_a_new_master_are_told():
    notice = only(Notice(t_s=9.0, level="warning", text=f"b{TERMINATION_WORDS}SIGTERM"), committed(20.0, 1))
    assert (notice.root.failure, notice.root.node, notice.root.evidence) == (Failure.TERMINATION, "b", "SIGTERM")
    master = only(MasterResumed(t_s=30.0, away_s=12.0))
    assert (master.root.failure, master.root.t_s) == (Failure.MASTER_LOST, 18.0)


def test_an_error_that_ends_the_job_is_fatal_and_keeps_its_traceback():
    reason = "an error ended the workers; node0:0 said:\nTraceback:\n  model.py\nValueError: bad shape"
    incident = only(JobEnded(t_s=9.0, exit_code=1, reason=reason))
    assert incident.is_fatal
    assert incident.root.failure is Failure.USER_EXCEPTION
    assert "model.py" in incident.root.evidence


@pytest.mark.parametrize("exit_code", [0, 130, 143])
def test_a_run_that_ends_as_asked_has_not_failed(exit_code):
    assert diagnose([START, JobEnded(t_s=9.0, exit_code=exit_code, reason="stopped")]) == ()


@pytest.mark.parametrize(
    ("is_tried_again", "words"), [(True, "is tried again by itself"), (False, "`oobleck add c` lets it back")]
)
def test_what_there_is_to_do_for_a_lost_node_is_true(is_tried_again, words):
    entry = replace(lost(9.0, "c"), is_tried_again=is_tried_again)
    assert words in only(entry, recovering(9.0, 2, "c"), recovered(9.1, 2, "c")).advice


def test_a_node_that_was_killed_on_request_is_nobodys_fault():
    entry = replace(lost(9.0, "c"), is_requested=True)
    incident = only(entry, recovering(9.0, 2, "c"), recovered(9.1, 2, "c"))
    assert incident.root.failure is Failure.REQUESTED
    assert incident.advice == "Nothing to do. The node is not tried again: `oobleck add c` lets it back."


@pytest.mark.parametrize(
    ("text", "is_tried_again"),
    [(f"c{LEFT_OUT_WORDS}no memory; once it is repaired", False), ("c: it is not taken in again: no memory", True)],
)
def test_a_node_that_its_check_finds_faulty_is_told_with_the_fault(text, is_tried_again):
    incident = only(Notice(t_s=9.0, level="warning", text=text))
    assert (incident.root.failure, incident.root.node) == (Failure.UNFIT_NODE, "c")
    assert incident.root.evidence.startswith("no memory")
    assert ("is tried again by itself" in incident.advice) is is_tried_again


def test_a_copy_that_differs_is_told_with_who_said_so():
    differs = "after step 5 layer 2 on c:0 differs from that on a:0, b:0: c:0 computed or kept it wrongly"
    incident = only(
        Notice(t_s=9.0, level="warning", text=differs),
        recovering(9.0, 2, "c", cause=Cause.CORRUPTION),
        recovered(9.1, 2, "c"),
    )
    assert (incident.root.failure, incident.root.node) == (Failure.CORRUPTION, "c")
    assert incident.root.evidence == differs
    assert incident.ended_s == 9.1


def test_a_slow_node_is_told_once_it_is_planned_for():
    slow = PaceChanged(t_s=9.0, node="c", factor=2.04)
    incident = only(slow, recovering(9.0, 2, "c", cause=Cause.SLOW), recovered(9.1, 2, "c"))
    assert (incident.root.failure, incident.root.node) == (Failure.SLOW, "c")
    assert incident.root.evidence == "c takes 2.0 times the usual time"
    assert incident.ended_s == 9.1
    assert "oobleck check" in incident.advice


def test_a_node_that_is_well_again_is_no_incident():
    entries = [PaceChanged(t_s=9.0, node="c", factor=2.0), PaceChanged(t_s=50.0, node="c", factor=1.0)]
    assert diagnose([START, *entries, recovering(50.0, 2, "c", cause=Cause.SLOW), recovered(50.1, 2, "c")]) == ()
    assert entries[1].describe() == "c takes the usual time again"


def test_a_node_at_fault_three_times_in_ten_minutes_is_to_be_taken_out():
    entries: list[JournalEntry] = []
    for index in range(3):
        at_s = 100.0 * (index + 1)
        entries += [down(at_s, "b"), recovering(at_s, index + 2, "b"), recovered(at_s + 0.2, index + 2, "b")]
    incidents = diagnose([START, *entries])
    assert [incident.repeated for incident in incidents] == [1, 2, 3]
    assert "oobleck drain b" in incidents[2].advice
    assert "oobleck drain b" not in incidents[1].advice


NODES = st.sampled_from("abcd")


@st.composite
def journals(draw) -> list[JournalEntry]:
    """Entries in any order that a run could tell them in, and many that none could."""
    entries: list[JournalEntry] = [START]
    now_s, generation = 5.0, 1
    for kind in draw(st.lists(st.sampled_from("lldrRRsnm"), max_size=30)):
        now_s += draw(st.sampled_from([0.0, 0.01, 1.0, 5.0]))
        match kind:
            case "l":
                entries.append(lost(now_s, draw(NODES), draw(st.sampled_from(list(Cause)))))
            case "d":
                entries.append(down(now_s, draw(NODES), draw(st.sampled_from(["exit code 1", "gloo", "MemoryError"]))))
            case "r":
                generation += 1
                entries.append(recovering(now_s, generation, cause=draw(st.sampled_from(list(Cause)))))
            case "R":
                entries.append(recovered(now_s, generation))
            case "s":
                entries.append(committed(now_s, generation, loss=draw(st.sampled_from([1.0, math.nan]))))
            case "n":
                entries.append(Notice(t_s=now_s, level="info", text="a word"))
            case _:
                entries.append(MasterResumed(t_s=now_s, away_s=1.0))
    return entries


@given(journals())
def test_every_loss_is_told_in_exactly_one_incident(entries):
    incidents = diagnose([*entries, JobEnded(t_s=1000.0, exit_code=0, reason="done")])
    findings = [finding for incident in incidents for finding in (incident.root, *incident.consequences)]
    told = sorted(finding.node for finding in findings if finding.node)
    assert told == sorted(entry.node for entry in entries if isinstance(entry, NodeLost | WorkerDown))
    for incident in incidents:
        all_by_peers = all(f.is_caused_by_peer for f in (incident.root, *incident.consequences))
        assert incident.root.is_caused_by_peer == all_by_peers
    assert [incident.number for incident in incidents] == list(range(1, len(incidents) + 1))
