"""Failures explained: every finding is told once, the root first, with what was done about it and what it cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import (
    Action,
    ConnectionLost,
    CutOff,
    Failure,
    HangExplained,
    Incident,
    JobEnded,
    JournalEntry,
    Loss,
    MasterResumed,
    NodeLost,
    NodeUnfit,
    Notice,
    PaceChanged,
    PlanAdopted,
    PlanCause,
    RecoveryStarted,
    ReplicasDiffer,
    Silent,
    StepDone,
    TerminationNoticed,
    WorkerDown,
    WorkerEnded,
    WorkerError,
    diagnose,
    failure_of_end,
)
from oobleck.control.journal.failures import Remedy
from oobleck.control.journal.incidents import Measure
from oobleck.control.protocol import ErrorKind, Exited, Killed, Raised, Unseen, WorkerEnd
from oobleck.planner import WorkerId
from tests.control.journals import adopted, committed, plan, recovered, run_with_a_loss

START = adopted(4.0, 1, plan(("a", "b"), ("c", "d")))


LOST = ConnectionLost()
SIGKILL = Killed(signal=9)


def lost(t_s: float, node: str, loss: Loss = LOST):
    return NodeLost(t_s=t_s, node=node, loss=loss)


def raising(kind: ErrorKind) -> Raised:
    return Raised(kind=kind, message="words that say nothing of killed by signal 11, gloo, MemoryError or data.paths")


def down(t_s: float, node: str, end: WorkerEnd = SIGKILL):
    return WorkerDown(t_s=t_s, node=node, device=0, pid=8, end=end)


def recovering(t_s: float, generation: int, *nodes: str, cause: PlanCause = PlanCause.LOSS):
    return RecoveryStarted(t_s=t_s, generation=generation, nodes=nodes, cause=cause)


def only(*entries: JournalEntry) -> Incident:
    (incident,) = diagnose([START, *entries])
    return incident


def test_a_run_without_failures_has_nothing_to_tell():
    assert diagnose([START, committed(5.0, 1), JobEnded(t_s=6.0, exit_code=0, reason="done")]) == ()


def test_the_loss_of_a_node_is_told_with_its_cost():
    (incident,) = diagnose(run_with_a_loss())
    *_, change = [entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted)]
    assert incident.root.failure is Failure.CONTACT_LOST
    assert incident.root.node == "node3"
    assert incident.lost == ("node3",)
    assert incident.stall_s == 0.05
    assert incident.microbatches_redone == 4
    assert incident.bytes_moved == 28_000_000
    assert [response.measure for response in incident.responses] == [Measure.NODE_LEFT_OUT, Measure.PLAN_CHANGED]
    assert incident.responses[1].reason == change.reason
    assert incident.ended_s is not None
    assert not incident.is_fatal


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        (Killed(signal=9), Failure.KILLED),
        (Killed(signal=15), Failure.KILLED),
        (Killed(signal=11), Failure.CRASHED),
        (Killed(signal=6), Failure.CRASHED),
        (Exited(exit_code=3), Failure.EXITED),
        (Unseen(), Failure.EXITED),
        (raising(ErrorKind.MEMORY), Failure.OUT_OF_MEMORY),
        (raising(ErrorKind.DEVICE), Failure.DEVICE),
        (raising(ErrorKind.PEER), Failure.PEER),
        (raising(ErrorKind.DATA), Failure.DATA_ERROR),
        (raising(ErrorKind.JOB), Failure.JOB_ERROR),
        (raising(ErrorKind.CODE), Failure.USER_EXCEPTION),
    ],
)
def test_what_ended_a_process_is_what_its_end_says_whatever_the_words(end, failure):
    assert failure_of_end(end) is failure
    assert only(down(9.0, "b", end)).root.failure is failure
    assert only(lost(9.0, "b", WorkerEnded(pid=8, end=end))).root.failure is failure


def test_a_silent_node_froze_when_it_was_last_heard_of():
    incident = only(lost(20.0, "b", Silent(silent_s=3.0)), recovering(20.0, 2, "b"))
    assert incident.root.failure is Failure.FROZEN
    assert incident.root.t_s == 17.0


def test_a_step_between_the_notice_of_a_frozen_node_and_its_recovery_changes_nothing():
    frozen = lost(20.0, "b", Silent(silent_s=3.0))
    incident = only(frozen, committed(20.1, 9), recovering(20.2, 2, "b"), recovered(20.4, 2, "b", stall_s=0.3))
    assert incident.stall_s == 0.3


def test_the_root_comes_first_even_when_a_peer_complained_before():
    incident = only(
        down(10.0, "a", raising(ErrorKind.PEER)),
        lost(10.1, "b"),
        recovering(10.1, 2, "a", "b"),
        recovered(10.4, 2, "a", "b"),
    )
    assert (incident.root.node, incident.root.failure) == ("b", Failure.CONTACT_LOST)
    assert [finding.node for finding in incident.consequences] == ["a"]


def test_a_node_that_froze_is_the_root_of_what_its_peers_met_before_it_was_noticed():
    incident = only(
        recovering(12.0, 2, cause=PlanCause.PEER_FAILED),
        lost(13.0, "c", Silent(silent_s=3.0)),
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
    assert "pipelines merge" in [response.reason for response in incident.responses]


def test_losses_with_time_between_them_are_incidents_of_their_own():
    entries = [lost(10.0, "a"), recovering(10.0, 2, "a"), recovered(10.2, 2, "a")]
    entries += [lost(11.0, "b"), recovering(11.0, 3, "b"), recovered(11.2, 3, "b")]
    assert [incident.root.node for incident in diagnose([START, *entries])] == ["a", "b"]


def test_a_spare_that_is_lost_is_no_part_of_the_next_loss():
    first, second = diagnose([START, lost(10.0, "spare"), lost(30.0, "a"), recovering(30.0, 2, "a")])
    assert (first.root.node, first.ended_s) == ("spare", 10.0)
    assert (second.root.node, second.ended_s) == ("a", None)


def test_a_node_that_joins_is_no_failure():
    assert diagnose([START, recovering(9.0, 2, "e", cause=PlanCause.JOINED), recovered(9.1, 2, "e")]) == ()


def test_a_hang_and_a_failed_collective_without_a_culprit_are_told():
    hang = only(recovering(20.0, 2, cause=PlanCause.HANG), recovered(20.5, 2))
    assert hang.root.failure is Failure.HANG
    assert only(recovering(20.0, 2, cause=PlanCause.PEER_FAILED), recovered(20.5, 2)).root.failure is Failure.PEER


def test_the_worker_that_all_wait_for_is_the_root_of_a_hang():
    stuck = WorkerId(node="b", device=0)
    explained = HangExplained(t_s=20.6, generation=2, cut_off=(), stuck=(stuck,), stacks=((stuck, "model.py: sleep"),))
    hung = recovering(20.0, 2, cause=PlanCause.HANG)
    incident = only(hung, explained, down(20.7, "b"), recovered(21.0, 2, "b"))
    assert (incident.root.failure, incident.root.node) == (Failure.STUCK, "b")
    assert incident.root.worker_id == stuck
    assert incident.root.detail == "model.py: sleep"


def test_a_node_that_does_not_reach_its_peers_is_the_root_of_a_hang():
    explained = HangExplained(t_s=20.6, generation=2, cut_off=("c",), stuck=(), stacks=())
    incident = only(recovering(20.0, 2, cause=PlanCause.HANG), explained, lost(20.7, "c", CutOff()), recovered(21, 2))
    assert (incident.root.failure, incident.root.node) == (Failure.CUT_OFF, "c")
    assert incident.lost == ("c",)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told_once(loss):
    incident = only(committed(5.0, 1), committed(6.0, 2, loss=loss), committed(7.0, 3, loss=loss), committed(20.0, 4))
    assert incident.root.failure is Failure.BAD_LOSS
    assert isinstance(incident.root.evidence, StepDone)
    assert incident.root.evidence.record.step == 2


def test_a_notice_of_termination_and_a_new_master_are_told():
    notice = only(TerminationNoticed(t_s=9.0, node="b", reason="SIGTERM"), committed(20.0, 1))
    assert (notice.root.failure, notice.root.node) == (Failure.TERMINATION, "b")
    master = only(MasterResumed(t_s=30.0, away_s=12.0))
    assert (master.root.failure, master.root.t_s) == (Failure.MASTER_LOST, 18.0)


def test_an_error_that_ends_the_job_is_fatal_and_is_what_the_worker_said():
    error = WorkerError(worker_id=WorkerId(node="a", device=0), end=raising(ErrorKind.CODE))
    incident = only(JobEnded(t_s=9.0, exit_code=1, reason="out of memory", error=error))
    assert incident.is_fatal
    assert incident.root.failure is Failure.USER_EXCEPTION
    assert only(JobEnded(t_s=9.0, exit_code=1, reason="an error; a:0 said:\nMemoryError")).root.failure is (
        Failure.JOB_FAILED
    )


def test_a_node_killed_on_request_that_ends_the_job_says_so_and_what_to_do():
    incident = only(
        replace(lost(9.0, "c"), is_requested=True, is_tried_again=False),
        JobEnded(t_s=9.5, exit_code=1, reason="cannot start:\nc: its connection was lost\nd: gone too"),
    )
    assert incident.is_fatal
    assert incident.remedies == (Remedy.START_AGAIN,)
    assert incident.responses[-1].text == "the job ended: cannot start: c: its connection was lost"


@pytest.mark.parametrize("exit_code", [0, 130, 143])
def test_a_run_that_ends_as_asked_has_not_failed(exit_code):
    assert diagnose([START, JobEnded(t_s=9.0, exit_code=exit_code, reason="stopped")]) == ()


@pytest.mark.parametrize(("is_tried_again", "remedy"), [(True, Remedy.IS_TRIED_AGAIN), (False, Remedy.ADD_NODE)])
def test_what_there_is_to_do_for_a_lost_node_is_true(is_tried_again, remedy):
    entry = replace(lost(9.0, "c"), is_tried_again=is_tried_again)
    assert only(entry, recovering(9.0, 2, "c"), recovered(9.1, 2, "c")).remedies == (Remedy.REACH_MACHINE, remedy)


def test_a_node_that_was_killed_on_request_is_nobodys_fault():
    entry = replace(lost(9.0, "c"), is_requested=True)
    incident = only(entry, recovering(9.0, 2, "c"), recovered(9.1, 2, "c"))
    assert incident.root.failure is Failure.REQUESTED
    assert incident.remedies == (Remedy.NOTHING, Remedy.ADD_NODE)


@pytest.mark.parametrize(("is_tried_again", "remedy"), [(True, Remedy.IS_TRIED_AGAIN), (False, Remedy.ADD_NODE)])
def test_a_node_that_its_check_finds_faulty_is_told_with_the_fault(is_tried_again, remedy):
    found = NodeUnfit(t_s=9.0, node="c", fault="no memory", is_tried_again=is_tried_again)
    incident = only(found)
    assert (incident.root.failure, incident.root.node) == (Failure.UNFIT_NODE, "c")
    assert incident.root.evidence is found
    assert incident.remedies == (Remedy.REPAIR_NODE, remedy)


def test_each_copy_that_differs_is_told_with_its_own_evidence():
    at = {node: WorkerId(node=node, device=0) for node in "abc"}
    differ = {
        node: ReplicasDiffer(t_s=8.9, step=5, layer=layer, odd=(at[node],), trusted=(at["a"],), is_sure=False)
        for node, layer in (("b", 1), ("c", 2))
    }
    incident = only(
        *differ.values(), recovering(9.0, 2, "b", "c", cause=PlanCause.CORRUPTION), recovered(9.1, 2, "b", "c")
    )
    findings = (incident.root, *incident.consequences)
    assert {found.node: found.evidence for found in findings} == differ
    assert {found.failure for found in findings} == {Failure.CORRUPTION}
    assert incident.ended_s == 9.1


def test_a_slow_node_is_told_once_it_is_planned_for():
    slow = PaceChanged(t_s=9.0, node="c", factor=2.04)
    incident = only(slow, recovering(9.0, 2, "c", cause=PlanCause.SLOW), recovered(9.1, 2, "c"))
    assert (incident.root.failure, incident.root.node) == (Failure.SLOW, "c")
    assert incident.root.evidence is slow
    assert incident.ended_s == 9.1
    assert incident.remedies == (Remedy.CHECK_SPEED,)


def test_a_node_that_is_well_again_is_no_incident():
    entries = [PaceChanged(t_s=9.0, node="c", factor=2.0), PaceChanged(t_s=50.0, node="c", factor=1.0)]
    assert diagnose([START, *entries, recovering(50.0, 2, "c", cause=PlanCause.SLOW), recovered(50.1, 2, "c")]) == ()


def test_a_node_at_fault_three_times_in_ten_minutes_is_to_be_taken_out():
    entries: list[JournalEntry] = []
    for index in range(3):
        at_s = 100.0 * (index + 1)
        entries += [down(at_s, "b"), recovering(at_s, index + 2, "b"), recovered(at_s + 0.2, index + 2, "b")]
    incidents = diagnose([START, *entries])
    assert [incident.repeated for incident in incidents] == [1, 2, 3]
    assert [incident.remedies[0] for incident in incidents] == [
        *(Remedy.LOOK_FOR_OOM_KILLER, Remedy.LOOK_FOR_OOM_KILLER, Remedy.CHECK_REPEATED_NODE)
    ]


NODES = st.sampled_from("abcd")


@st.composite
def journals(draw) -> list[JournalEntry]:
    """Entries in any order that a run could tell them in, and many that none could."""
    entries: list[JournalEntry] = [START]
    now_s, generation = 5.0, 1
    losses = [LOST, Silent(silent_s=3.0), CutOff(), WorkerEnded(pid=8, end=raising(ErrorKind.PEER))]
    ends = [Exited(exit_code=1), raising(ErrorKind.PEER), raising(ErrorKind.MEMORY)]
    for kind in draw(st.lists(st.sampled_from("lldrRRsnm"), max_size=30)):
        now_s += draw(st.sampled_from([0.0, 0.01, 1.0, 5.0]))
        match kind:
            case "l":
                entries.append(lost(now_s, draw(NODES), draw(st.sampled_from(losses))))
            case "d":
                entries.append(down(now_s, draw(NODES), draw(st.sampled_from(ends))))
            case "r":
                generation += 1
                entries.append(recovering(now_s, generation, cause=draw(st.sampled_from(list(PlanCause)))))
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
