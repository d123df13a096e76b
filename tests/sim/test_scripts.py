"""`oobleck run` on the whole stack: generated traces, the real master, agents and coordinator, virtual ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control import journal
from oobleck.job import ControlSpec
from oobleck.job.ranks import RanksSpec
from oobleck.sim.cluster import run_scripts
from oobleck.sim.cluster.ranks import VirtualScript
from oobleck.sim.cluster.run import ScriptsRun, journal_digest
from oobleck.sim.trace import (
    AgentCrashed,
    AgentFrozen,
    ClusterState,
    ForkServerCrashed,
    Frozen,
    Healed,
    Joined,
    Lost,
    MasterCrashed,
    MasterFrozen,
    Noticed,
    Partitioned,
    Thawed,
    Trace,
    TraceEvent,
    WorkerCrashed,
)
from tests.examples import examples
from tests.sim.strategies import traces
from tests.sim.virtual import Setting

QUIET_S = 200.0
"""Without a fault, at the end of each trace: longer than all waits together."""
MAX_RESTARTS = 2
SCRIPT = VirtualScript()
STOPPED = "the trace ends"
FAULTS = (
    Lost, Joined, Frozen, Thawed, WorkerCrashed, ForkServerCrashed, AgentCrashed, AgentFrozen, MasterFrozen,
    MasterCrashed, Partitioned, Healed, Noticed,
)  # fmt: skip

gaps = st.one_of(st.just(0.0), st.floats(0, 0.05), st.floats(0, 1.0), st.floats(0, 8.0))
times = st.lists(gaps, max_size=8).map(lambda waits: [3.0 + sum(waits[: index + 1]) for index in range(len(waits))])
scripts = st.builds(
    VirtualScript,
    work_s=st.sampled_from([4.0, 10.0]),
    ending_s=st.sampled_from([0.0, 0.5, 10.0]),
    leaves_s=st.sampled_from([None, 0.0, 0.1, 20.0]),
)


def stopped_storms(duration_s: float) -> st.SearchStrategy[Trace]:
    return traces(max_nodes=4, duration_s=duration_s, kinds=FAULTS)


storms = traces(max_nodes=4, duration_s=100.0 + QUIET_S, kinds=FAULTS, times=times)


def play(
    trace: Trace,
    *,
    script: VirtualScript = SCRIPT,
    seed: int = 0,
    devices: int = 1,
    max_restarts: int = MAX_RESTARTS,
) -> ScriptsRun:
    spec = RanksSpec(
        tag="script",
        entry="script",
        command=("train.py",),
        directory="/",
        min_nodes=1,
        max_nodes=len(trace.nodes),
        max_restarts=max_restarts,
        hang_timeout_s=0.0,
        join_timeout_s=20.0,
        shutdown_timeout_s=3.0,
        control=ControlSpec(orphan_timeout_s=20.0),
    )
    return run_scripts(
        trace, run=spec, script=script, seed=seed, devices_per_node=devices, profile=Setting(devices=devices).profile
    )


def trace_of(*events: TraceEvent, num_nodes: int = 3) -> Trace:
    nodes = tuple(f"node{number}" for number in range(num_nodes))
    return Trace(duration_s=100.0 + QUIET_S, nodes=nodes, start=nodes, events=events)


def check_ranks(played: ScriptsRun, trace: Trace, *, max_restarts: int = MAX_RESTARTS) -> None:
    """No rank is left, ranks of one generation know each other by different numbers, and the end is true."""
    assert not played.left
    cluster = ClusterState(trace.start)
    for event in trace.events:
        if event.t_s <= played.entries[-1].t_s:
            cluster.apply(event)
    hidden = {event.node for event in trace.events if isinstance(event, AgentFrozen)} | cluster.frozen | cluster.cut
    assert {rank.node for rank in played.left_at_end} <= hidden
    by_start: dict[str, dict[int, bool]] = {}
    for rank, setup in ((each, setup) for each in played.ranks for setup in each.places):
        works = by_start.setdefault(setup.order.start, {})
        assert setup.rank < setup.order.world_size
        assert setup.rank not in works
        works[setup.rank] = rank.has_worked and setup is rank.setup
    formed = [entry for entry in played.entries if isinstance(entry, journal.GenerationFormed)]
    num_failures = sum(isinstance(entry, journal.RankDown) and entry.is_first for entry in played.entries)
    if played.end.exit_code:
        turns = [
            entry for entry in played.entries if isinstance(entry, journal.GenerationFormed | journal.GenerationEnded)
        ]
        assert num_failures > max_restarts or not turns or isinstance(turns[-1], journal.GenerationEnded)
    elif not played.end.reason.startswith(STOPPED):
        assert num_failures <= max_restarts
        num_ranks = sum(each.num_ranks for each in formed[-1].nodes)
        assert by_start[max(by_start)] == dict.fromkeys(range(num_ranks), True)
    assert isinstance(played.entries[-1], journal.JobEnded)
    assert played.entries[-1].exit_code == played.end.exit_code


@examples(120)
@given(storms, scripts, st.integers(0, 2**32), st.integers(1, 2))
def test_no_storm_leaves_a_rank_behind_or_ends_in_a_false_exit_status(
    trace: Trace, script: VirtualScript, seed: int, devices: int
) -> None:
    played = play(trace, script=script, seed=seed, devices=devices)
    check_ranks(played, trace)
    assert not played.end.reason.startswith(STOPPED), "the run ends by itself within the quiet time"


@examples(60)
@given(st.floats(3.0, 25.0).flatmap(stopped_storms), scripts, st.integers(0, 2**32))
def test_a_stop_in_the_middle_of_a_storm_leaves_no_rank_behind(trace: Trace, script: VirtualScript, seed: int) -> None:
    check_ranks(play(trace, script=script, seed=seed), trace)


@examples(10)
@given(storms, st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_journal(trace: Trace, seed: int) -> None:
    first, second = play(trace, seed=seed), play(trace, seed=seed)
    assert journal_digest(first.entries) == journal_digest(second.entries)


def test_the_others_start_again_without_a_lost_node() -> None:
    trace = trace_of(Lost(t_s=8.0, node="node1"))
    played = play(trace)
    check_ranks(played, trace)
    assert played.end.exit_code == 0
    assert {rank.node for rank in played.ranks if rank.has_worked} == {"node0", "node2"}


def test_survivors_keep_their_processes_and_a_spare_takes_a_lost_place() -> None:
    trace = trace_of(Lost(t_s=12.0, node="node1"), WorkerCrashed(t_s=14.0, node="node0"))
    played = play(trace, script=VirtualScript(leaves_s=0.05))
    check_ranks(played, trace)
    assert played.end.exit_code == 0
    kept = [entry.num_kept for entry in played.entries if isinstance(entry, journal.GenerationRuns)]
    assert kept == [0, 2, 2]
    generations = [[setup.order.generation for setup in rank.places] for rank in played.ranks]
    assert sorted(filter(None, generations)) == [[1], [1, 2], [1, 2, 3], [3]]


def test_ranks_that_get_nowhere_start_in_new_processes() -> None:
    trace = trace_of(*(WorkerCrashed(t_s=t_s, node="node0") for t_s in (12.0, 20.0, 28.0)))
    played = play(trace, script=VirtualScript(leaves_s=0.05), max_restarts=3)
    check_ranks(played, trace, max_restarts=3)
    kept = [entry.num_kept for entry in played.entries if isinstance(entry, journal.GenerationRuns)]
    assert kept == [0, 3, 3, 0]


def test_a_rank_that_does_not_leave_its_attempt_is_replaced() -> None:
    trace = trace_of(WorkerCrashed(t_s=12.0, node="node0"))
    played = play(trace, script=VirtualScript(leaves_s=20.0))
    check_ranks(played, trace)
    assert played.end.exit_code == 0


def test_the_ranks_of_a_frozen_node_end_once_it_thaws() -> None:
    trace = trace_of(Frozen(t_s=8.0, node="node2"))
    played = play(trace)
    check_ranks(played, trace)
    assert {rank.node for rank in played.left_at_end} == {"node2"}


def test_a_run_whose_ranks_fail_too_often_fails_and_leaves_none() -> None:
    crashes = tuple(WorkerCrashed(t_s=t_s, node="node0") for t_s in (6.0, 8.0, 10.0))
    trace = trace_of(*crashes)
    played = play(trace)
    check_ranks(played, trace)
    assert played.end.exit_code == 1
    assert not played.left_at_end


def test_nothing_follows_the_end_of_a_run_in_its_journal() -> None:
    nodes = ("node1", "node0")
    cut_off = (Joined(t_s=9.0, node="node0"), Partitioned(t_s=9.9, nodes=nodes))
    trace = Trace(duration_s=10.0, nodes=nodes, start=("node1",), events=cut_off)
    played = play(trace, script=VirtualScript(ending_s=10.0))
    check_ranks(played, trace)
    assert {entry.node for entry in played.entries if isinstance(entry, journal.NodeLost)} == {"node1"}


def test_a_stop_ends_all_ranks_even_those_that_ignore_it() -> None:
    trace = Trace(duration_s=6.0, nodes=("node0", "node1"), start=("node0", "node1"))
    played = play(trace, script=VirtualScript(ending_s=10.0))
    assert played.end.reason == STOPPED
    assert not played.left_at_end
    assert not any(rank.has_worked for rank in played.ranks)


def test_ranks_run_on_without_a_master_and_the_next_takes_over() -> None:
    trace = trace_of(MasterCrashed(t_s=6.0, down_s=3.0))
    played = play(trace)
    check_ranks(played, trace)
    assert played.end.exit_code == 0
    assert len([entry for entry in played.entries if isinstance(entry, journal.MasterResumed)]) == 1
    assert len(played.ranks) == 3, "none was started again"


def test_ranks_that_finish_without_a_master_are_done() -> None:
    played = play(trace_of(MasterCrashed(t_s=6.0, down_s=12.0)))
    assert (played.end.exit_code, len(played.ranks)) == (0, 3)


@pytest.mark.parametrize("fault", [Lost, AgentCrashed, WorkerCrashed])
def test_what_happens_while_there_is_no_master_is_handled_by_the_next(fault: type[Lost]) -> None:
    trace = trace_of(MasterCrashed(t_s=6.0, down_s=3.0), fault(t_s=7.0, node="node1"))
    played = play(trace)
    check_ranks(played, trace)
    assert played.end.exit_code == 0
    nodes = {"node0", "node2"} | ({"node1"} if fault is WorkerCrashed else set())
    assert {rank.node for rank in played.ranks if rank.has_worked} == nodes


@pytest.mark.parametrize("t_s", [3.9 + 0.05 * number for number in range(24)])
def test_a_master_that_dies_while_ranks_start_leaves_a_run_that_the_next_one_starts_again(t_s: float) -> None:
    faults = (WorkerCrashed(t_s=4.5, node="node0"), MasterCrashed(t_s=t_s, down_s=1.0))
    trace = trace_of(*sorted(faults, key=lambda fault: fault.t_s))
    played = play(trace)
    check_ranks(played, trace)
    assert played.end.exit_code == 0
