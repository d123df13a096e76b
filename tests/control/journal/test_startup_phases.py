"""A run says what it does before its first step, and how far that is."""

from __future__ import annotations

from oobleck.control.journal import (
    GenerationCause,
    GenerationFormed,
    GenerationRuns,
    JournalEntry,
    MasterResumed,
    Measured,
    MeasurementBegun,
    NodeConnected,
    NodeRanks,
    PhaseView,
    PipelinesFormed,
    RunView,
    ScriptStarted,
    WorkerUp,
)
from oobleck.planner import WorkerId
from tests.control.journals import adopted, committed, job_started, plan, script_with_a_failure

NODES = ("node0", "node1")


def connected(t_s: float, node: str) -> NodeConnected:
    return NodeConnected(t_s=t_s, node=node, agent_pid=1)


def up(t_s: float, node: str) -> WorkerUp:
    return WorkerUp(t_s=t_s, node=node, device=0, pid=2, data_digest="d")


def phases_of(*entries: JournalEntry) -> list[PhaseView | None]:
    view, phases = RunView(), []
    for entry in entries:
        view.apply(entry)
        phases.append(view.at(entry.t_s + 0.5).phase)
    return phases


def test_a_run_passes_through_its_phases_and_counts_what_is_done():
    measured = MeasurementBegun(t_s=3.0, what=Measured.LAYERS, workers=(WorkerId(node="node0", device=0),))
    phases = phases_of(
        job_started(NODES),
        connected(1.0, "node0"),
        connected(2.0, "node1"),
        up(2.5, "node0"),
        measured,
        up(4.0, "node1"),
        adopted(5.0, 1, plan(NODES)),
        PipelinesFormed(t_s=6.0, generation=1),
        committed(8.0, 1),
        adopted(9.0, 2, plan(NODES)),
    )
    assert [phase and (phase.name, phase.num_done, phase.num_all, phase.elapsed_s) for phase in phases] == [
        ("connecting", 0, 2, 0.5),
        ("connecting", 1, 2, 1.5),
        ("importing", 0, 2, 0.5),
        ("importing", 1, 2, 1.0),
        ("importing", 1, 2, 1.5),
        ("measuring", 0, 0, 0.5),
        ("forming", 0, 0, 0.5),
        ("first_step", 0, 0, 0.5),
        None,
        None,
    ]
    assert phases[1] is not None
    assert phases[1].sentence == "connecting to 2 nodes (1 of 2)"


def test_what_was_measured_before_is_looked_for_only():
    (*_, last) = phases_of(job_started(("node0",)), connected(1.0, "node0"), up(2.0, "node0"))
    assert last is not None
    assert last.name == "looking"


def test_a_run_that_is_taken_over_is_in_no_phase():
    assert phases_of(job_started(NODES), MasterResumed(t_s=5.0, away_s=1.0))[-1] is None


def test_a_script_starts_its_ranks_once():
    started = next(entry for entry in script_with_a_failure() if isinstance(entry, ScriptStarted))
    formed = GenerationFormed(
        t_s=3.0,
        generation=1,
        cause=GenerationCause.START,
        nodes=(NodeRanks(node="node0", first_rank=0, num_ranks=2),),
        num_failures=0,
    )
    runs = GenerationRuns(t_s=4.0, generation=1, away_s=4.0, is_warm=False)
    phases = phases_of(started, formed, runs, formed)
    assert [phase and phase.text for phase in phases[1:]] == ["starting 2 ranks", None, None]
