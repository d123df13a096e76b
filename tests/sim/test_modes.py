"""The two modes decide alike, and a run's decisions follow from what the coordinator was told and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile

from hypothesis import example, given
from hypothesis import strategies as st

from oobleck.control.journal import (
    Action,
    JobEnded,
    JobStarted,
    JournalEntry,
    NodeAdded,
    NodeLeft,
    NodeLost,
    PlanAdopted,
    PlanCause,
    RecoveryStarted,
    WorkerDown,
)
from oobleck.control.training.coordinator import Coordinator
from oobleck.sim.cluster.cluster import PYTHON_VERSION
from oobleck.sim.cluster.run import run_cluster
from oobleck.sim.sweep.settings import SweepSettings
from oobleck.sim.sweep.sweep import sweep
from oobleck.sim.trace import Joined, Lost, Noticed, Trace, TraceEvent, WorkerCrashed
from tests.examples import examples
from tests.sim.strategies import traces
from tests.sim.test_promises import PLAIN, SHAPES, faulty
from tests.sim.virtual import STARTED_S, Setting

SPACED_S = 20.0
"""From one fault to the next: by then every recovery is over, in both modes."""


def trace_of(entries: Iterable[JournalEntry]) -> Trace:
    """What happened to the nodes of a run, read from its journal."""
    nodes: dict[str, None] = {}
    start: tuple[str, ...] = ()
    events: list[TraceEvent] = []
    duration_s = 0.0
    for entry in entries:
        match entry:
            case JobStarted(nodes=specs):
                start = tuple(spec.name for spec in specs)
                nodes.update(dict.fromkeys(start))
            case NodeLost(t_s=t_s, node=node):
                events.append(Lost(t_s=t_s, node=node))
            case NodeAdded(t_s=t_s, node=spec):
                nodes[spec.name] = None
                events.append(Joined(t_s=t_s, node=spec.name))
            case RecoveryStarted(t_s=t_s, cause=PlanCause.DRAINED, nodes=(node,)):
                events.append(Noticed(t_s=t_s, node=node, grace_s=5.0))  # it may stay: the others may be too few
            case NodeLeft(t_s=t_s, node=node):
                events.append(Lost(t_s=t_s + 5.0, node=node))
            case WorkerDown(t_s=t_s, node=node, device=device):
                events.append(WorkerCrashed(t_s=t_s, node=node, device=device))
            case JobEnded(t_s=t_s):
                duration_s = t_s
            case _:
                pass
    return Trace(duration_s=duration_s, nodes=tuple(nodes), start=start, events=tuple(events))


def plans(entries: Iterable[JournalEntry]) -> list[tuple[object, ...]]:
    adopted = [entry for entry in entries if isinstance(entry, PlanAdopted)]
    return [(entry.plan, entry.action, entry.predicted_step_s, entry.schedules) for entry in adopted]


spaced = st.integers(1, 3).map(lambda number: [STARTED_S + SPACED_S * (index + 1) for index in range(number)])


_FOUR = ("node0", "node1", "node2", "node3")
ONE_MUST_STAY = Trace(
    duration_s=1e6,
    nodes=_FOUR,
    start=_FOUR,
    events=(
        Lost(t_s=STARTED_S + SPACED_S, node="node0"),
        Lost(t_s=STARTED_S + 2 * SPACED_S, node="node1"),
        Noticed(t_s=STARTED_S + 3 * SPACED_S, node="node2", grace_s=0.0),
    ),
)
"""The last two hold the model together, so that one with notice is kept."""


@examples(8)
@example(trace=ONE_MUST_STAY, setting=replace(PLAIN, layers_per_device=2), seed=0)
@given(
    trace=traces(
        min_nodes=4,
        max_nodes=5,
        duration_s=1e6,
        kinds=(Lost, Joined, WorkerCrashed, Noticed),
        times=spaced,
        all_start=True,
    ),
    setting=st.sampled_from(
        (PLAIN, replace(PLAIN, layers_per_device=2), replace(PLAIN, layers_per_device=2, schedule="auto"))
    ),
    seed=st.integers(0, 2**32),
)
def test_the_journal_of_a_cluster_run_gives_the_same_plans_in_the_sweep_mode(trace: Trace, setting: Setting, seed: int):
    trace = replace(trace, duration_s=STARTED_S + 4 * SPACED_S, source="")
    job = replace(setting.job, control=replace(setting.job.control, rejoin_after_s=0))
    played = run_cluster(trace, job=job, profile=setting.profile, seed=seed)
    settings = SweepSettings(
        profile=setting.profile,
        global_batch_size=job.global_batch_size,
        fault_threshold=job.fault_threshold,
        schedule=job.schedule,
    )
    # Where all state is lost, the one has no checkpoints, and begins again; the other has some.
    decided = list(takewhile(lambda plan: plan[1] is not Action.BEGIN_AGAIN, plans(played.entries)))
    assert plans(sweep(trace_of(played.entries), settings))[: len(decided)] == decided


@examples(15)
@given(trace=faulty((Lost, Joined, WorkerCrashed, Noticed)), setting=st.sampled_from(SHAPES), seed=st.integers(0, 99))
def test_a_coordinator_that_is_told_the_same_commands_the_same(trace: Trace, setting: Setting, seed: int):
    played = run_cluster(
        trace,
        job=setting.job,
        profile=setting.profile,
        seed=seed,
        devices_per_node=setting.devices,
        keep_decisions=True,
    )
    started = next(entry for entry in played.entries if isinstance(entry, JobStarted))
    coordinator = Coordinator(started.job, started.nodes, started_at=started.started_at, python_version=PYTHON_VERSION)
    first, *others = played.decisions
    assert tuple(coordinator.start(first.now_s)) == first.commands
    for decided in others:
        if decided.event is None:
            commands = coordinator.handle_deadline(decided.now_s)
        else:
            commands = coordinator.handle(decided.now_s, decided.event)
        assert tuple(commands) == decided.commands
