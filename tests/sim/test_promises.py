"""The promises, on the whole stack: generated traces, generated seeds, the real master, agents and coordinator.

`HYPOTHESIS_PROFILE=deep pytest tests/sim/test_promises.py` plays 20,000 traces of each property.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from oobleck.control.journal import NodeAdded, NodeLost, PlanAdopted, StepDone, WorkerDown
from oobleck.job import ScalingSpec, ScheduleName
from oobleck.planner import LayerProfile, NodeKind, WorkerId
from oobleck.sim.cluster.run import ClusterRun, run_cluster
from oobleck.sim.trace import (
    AgentCrashed,
    AgentFrozen,
    ForkServerCrashed,
    Frozen,
    Healed,
    Joined,
    Lost,
    MasterCrashed,
    MasterFrozen,
    Noticed,
    Partitioned,
    Slowed,
    Thawed,
    Trace,
    TraceEvent,
    WorkerCrashed,
)
from tests.examples import examples
from tests.sim.promises import check_liveness, check_safety
from tests.sim.strategies import traces
from tests.sim.virtual import Setting

QUIET_S = 60.0
"""Without a fault, at the end of each trace: longer than anything is waited for."""
BEGIN_S = 6.0
"""By then everybody trains, over slow links too."""
FOUND_OUT_S = 12.0
"""By then a slow node is left out."""
RETRIED_S = 200.0
"""By then, or soon after, it is tried again."""
RESUMED_S = 40.0
"""Leases, hangs and retries one after the other."""

SLOWER = 1.5
"""How many times as long as others nodes of a slow kind take."""

gaps = st.one_of(st.just(0.0), st.floats(0, 0.05), st.floats(0, 1.0), st.floats(0, 8.0))
times = st.lists(gaps, max_size=6).map(lambda waits: [BEGIN_S + sum(waits[: index + 1]) for index in range(len(waits))])
"""Close together: what is rare in life, a fault in the recovery from another, is what we look for."""

PLAIN = Setting(slowness=5.0, heartbeat_interval_s=1.0)
SHAPES = (
    PLAIN,
    replace(PLAIN, layers_per_device=2),
    replace(PLAIN, layers_per_device=2, fault_threshold=0),
    replace(PLAIN, num_layers=6, layers_per_device=3),
    replace(PLAIN, num_layers=6, layers_per_device=3, slowness=20.0),  # steps of 9 s: some are run again
    replace(PLAIN, devices=2, layers_per_device=2),
    replace(PLAIN, num_pipelines=2),
    replace(PLAIN, link_latency_s=0.2),
    replace(PLAIN, relay_nodes=3),
    replace(PLAIN, layers_per_device=2, link_latency_s=0.2),
    replace(PLAIN, scaling=ScalingSpec(policy="efficient", hysteresis_s=2.0)),
    replace(PLAIN, max_steps=1000, scaling=ScalingSpec(policy="deadline", deadline_s=3000.0, hysteresis_s=1.0)),
    replace(PLAIN, layers_per_device=2, schedule="auto"),
    replace(PLAIN, reductions=4),
    replace(PLAIN, num_layers=6, layers_per_device=3, slowness=20.0, reductions=4),
    replace(PLAIN, num_layers=6, layers_per_device=4, schedule="interleaved"),
    replace(PLAIN, num_layers=6, layers_per_device=4, slowness=20.0, reductions=2, schedule="interleaved"),
)
ALL = (
    Lost, Joined, Frozen, Thawed, Slowed, WorkerCrashed, AgentCrashed, AgentFrozen, Noticed, MasterCrashed,
    MasterFrozen, Partitioned, Healed, ForkServerCrashed,
)  # fmt: skip
NODES = (Lost, Joined, WorkerCrashed, AgentCrashed, ForkServerCrashed)


def faulty(kinds, *, min_nodes: int = 2, max_nodes: int = 5) -> st.SearchStrategy[Trace]:
    return traces(
        min_nodes=min_nodes, max_nodes=max_nodes, duration_s=1e6, kinds=kinds, times=times, all_start=True
    ).map(_with_quiet_end)


def _with_quiet_end(trace: Trace) -> Trace:
    """Time to recover in; nodes are at most twice as slow, or a single step would outlast it."""
    events = tuple(
        replace(event, factor=min(event.factor, 2.0)) if isinstance(event, Slowed) else event for event in trace.events
    )
    return replace(trace, events=events, duration_s=_last_fault_s(trace) + QUIET_S, source="")


def _last_fault_s(trace: Trace) -> float:
    return max(map(_end_s, trace.events), default=BEGIN_S)


def _end_s(event: TraceEvent) -> float:
    match event:
        case MasterCrashed(down_s=lasts_s) | MasterFrozen(frozen_s=lasts_s) | AgentFrozen(frozen_s=lasts_s):
            return event.t_s + lasts_s
        case _:
            return event.t_s


@st.composite
def of_kinds(draw: st.DrawFn) -> Trace:
    """A trace whose nodes are of kinds; one that is slow by its kind gets little slower, for `_with_quiet_end`."""
    trace = draw(faulty(ALL))
    events = tuple(
        replace(event, factor=min(event.factor, 2.0 / SLOWER)) if isinstance(event, Slowed) else event
        for event in trace.events
    )
    kinds = {node: draw(st.sampled_from(("fast", "slow", "wide"))) for node in trace.nodes}
    return replace(trace, events=events, kinds=kinds)


def kinds_of(trace: Trace, setting: Setting) -> tuple[NodeKind, ...]:
    """Nodes as the setting has them, ones that take half as long again, and ones of two devices with less memory."""
    plain = setting.profile
    slow = replace(plain, layers=tuple(_slowed(layer, SLOWER) for layer in plain.layers))
    memory_bytes = max(plain.device.memory_bytes // 2, max(layer.state_bytes for layer in plain.layers) * 3)
    wide = replace(plain, device=replace(plain.device, memory_bytes=memory_bytes))
    kinds = (
        NodeKind(name="fast", profile=plain, devices_per_node=setting.devices),
        NodeKind(name="slow", profile=slow, devices_per_node=setting.devices),
        NodeKind(name="wide", profile=wide, devices_per_node=2),
    )
    return tuple(kind for kind in kinds if kind.name in trace.kinds.values())


def _slowed(layer: LayerProfile, factor: float) -> LayerProfile:
    return replace(
        layer,
        forward_s={1: factor * layer.forward_s[1]},
        backward_s={1: factor * layer.backward_s[1]},
    )


def play(trace: Trace, setting: Setting, seed: int) -> ClusterRun:
    """Play a trace and hold the run to all that is promised."""
    played = run_cluster(
        trace,
        job=setting.job,
        profile=setting.profile,
        seed=seed,
        devices_per_node=setting.devices,
        kinds=kinds_of(trace, setting) if trace.kinds else (),
        delays=replace(setting.delays, profile_s=0.2),
        keep_decisions=True,
    )
    check_safety(played, num_microbatches=setting.job.num_microbatches)
    check_liveness(played, last_fault_s=_last_fault_s(trace), within_s=RESUMED_S)
    return played


seeds = st.integers(0, 2**32)


@examples(40)
@given(trace=faulty(NODES), setting=st.sampled_from(SHAPES), seed=seeds)
def test_nodes_and_processes_that_end_break_no_promise(trace: Trace, setting: Setting, seed: int):
    play(trace, setting, seed)


@examples(60)
@given(trace=faulty(ALL), setting=st.sampled_from(SHAPES), seed=seeds)
def test_faults_of_all_kinds_break_no_promise(trace: Trace, setting: Setting, seed: int):
    play(trace, setting, seed)


@examples(40)
@given(trace=of_kinds(), setting=st.sampled_from(SHAPES), seed=seeds)
def test_clusters_of_several_kinds_break_no_promise(trace: Trace, setting: Setting, seed: int):
    play(trace, setting, seed)


@examples(8)
@given(trace=faulty(ALL), seed=seeds)
def test_a_trace_and_a_seed_have_one_journal(trace: Trace, seed: int):
    first, second = (play(trace, SHAPES[1], seed) for _ in range(2))
    assert first.digest == second.digest


@examples(6)
@given(
    node=st.sampled_from(("n0", "n3")),
    crash_s=st.floats(BEGIN_S, BEGIN_S + 3.0),
    under_way_s=st.floats(0.0, 0.15),
    down_s=st.floats(0.5, 4.0),
    seed=seeds,
)
def test_what_a_killed_master_had_not_heard_is_told_to_the_next(
    node: str, crash_s: float, under_way_s: float, down_s: float, seed: int
):
    """A worker ends, and while its node says so, over a slow link, the master ends too."""
    setting = replace(
        PLAIN,
        link_latency_s=0.2,
        events=(WorkerCrashed(t_s=crash_s, node=node), MasterCrashed(t_s=crash_s + under_way_s, down_s=down_s)),
        duration_s=crash_s + QUIET_S,
    )
    played = play(setting.trace, setting, seed)
    assert [entry.node for entry in played.entries if isinstance(entry, WorkerDown)] == [node]
    assert not any(isinstance(entry, NodeLost) for entry in played.entries), "it was started again in its place"


@st.composite
def slow_traces(draw: st.DrawFn) -> Trace:
    """A node is slow for so long that it is left out; other things happen then, or when it is tried again."""
    trace = draw(faulty((Slowed, Lost, Joined, WorkerCrashed, Noticed, MasterCrashed), min_nodes=4))
    slow = Slowed(t_s=BEGIN_S, node="node0", factor=draw(st.floats(2.0, 4.0)))
    after_s = draw(st.sampled_from((FOUND_OUT_S, RETRIED_S)))
    events = tuple(replace(event, t_s=event.t_s + after_s) for event in trace.events)
    return replace(trace, events=(slow, *events), duration_s=trace.duration_s + RETRIED_S)


FLIPPING = Trace(
    duration_s=386.59522329535884,
    nodes=tuple(f"node{number}" for number in range(5)),
    start=tuple(f"node{number}" for number in range(5)),
    events=(
        Slowed(t_s=6.0, node="node0", factor=3.00757571566721),
        WorkerCrashed(t_s=206.0, node="node0"),
        WorkerCrashed(t_s=206.59522329535884, node="node3"),
        Slowed(t_s=206.59522329535884, node="node2", factor=2.0),
        Lost(t_s=206.59522329535884, node="node1"),
    ),
)
"""How slow node2 looked depended on the plan, and the plan on that: plans never settled, and a stop waited for one."""


MOST_OF_THEM_SLOW = Trace(
    duration_s=292.38,
    nodes=tuple(f"node{number}" for number in range(5)),
    start=tuple(f"node{number}" for number in range(5)),
    events=(
        Slowed(t_s=6.0, node="node0", factor=2.5168416665309916),
        WorkerCrashed(t_s=18.0, node="node0"),
        Slowed(t_s=18.0, node="node3", factor=2.0),
        Slowed(t_s=18.0, node="node1", factor=2.0),
        Noticed(t_s=18.0, node="node0", grace_s=0.0),
        MasterCrashed(t_s=18.0, down_s=29.655635178509996),
    ),
)
"""Whether a slow node's peers were slow as well depended on the plan: each plan refuted its own reason."""


@examples(8)
@example(trace=FLIPPING, setting=PLAIN, seed=8261)
@example(trace=MOST_OF_THEM_SLOW, setting=PLAIN, seed=0)
@given(trace=slow_traces(), setting=st.sampled_from((PLAIN, *SHAPES[6:10])), seed=seeds)
def test_trying_slow_nodes_again_breaks_no_promise(trace: Trace, setting: Setting, seed: int):
    play(trace, setting, seed)


@st.composite
def mild_traces(draw: st.DrawFn) -> Trace:
    """Up to f nodes go at once, come back, and time passes before the next ones go."""
    nodes = tuple(f"node{number}" for number in range(draw(st.integers(4, 5))))
    events: list[Lost | Joined | WorkerCrashed] = []
    now_s = BEGIN_S + draw(st.floats(0, 3.0))
    for _ in range(draw(st.integers(1, 3))):
        node = draw(st.sampled_from(nodes))
        if draw(st.booleans()):
            events.append(WorkerCrashed(t_s=now_s, node=node))
        else:
            events += [Lost(t_s=now_s, node=node), Joined(t_s=now_s + draw(st.floats(0.5, 10.0)), node=node)]
        now_s += draw(st.floats(25.0, 40.0))
    return Trace(duration_s=now_s + QUIET_S, nodes=nodes, start=nodes, events=tuple(events))


MAX_CRASHES = 3
"""Of a node's workers within ten minutes, after which it is given up."""


@st.composite
def crashes(draw: st.DrawFn) -> Trace:
    """Workers and fork servers end, often all at once, and sometimes the master; every agent lives."""
    nodes = tuple(f"node{number}" for number in range(draw(st.integers(1, 4))))
    left = dict.fromkeys(nodes, MAX_CRASHES)
    events: list[WorkerCrashed | ForkServerCrashed | MasterCrashed] = []
    now_s = BEGIN_S
    for _ in range(draw(st.integers(1, 4))):
        now_s += draw(gaps)
        for node in draw(st.one_of(st.just(nodes), st.permutations(nodes))):
            now_s += draw(st.one_of(st.just(0.0), st.floats(0, 0.05), st.floats(0, 0.5)))
            if draw(st.integers(0, 3)) == 0:
                events.append(ForkServerCrashed(t_s=now_s, node=node))
            if left[node] and draw(st.integers(0, 5)):
                left[node] -= 1
                events.append(WorkerCrashed(t_s=now_s, node=node))
        if draw(st.integers(0, 7)) == 0:
            events.append(MasterCrashed(t_s=now_s, down_s=draw(st.floats(0.1, 3.0))))
    return Trace(duration_s=now_s + RESUMED_S, nodes=nodes, start=nodes, events=tuple(events))


@st.composite
def failing_devices(draw: st.DrawFn) -> tuple[Trace, str, int]:
    """A device ends each of its workers, once they train or before; other nodes and the master may fail meanwhile."""
    nodes = tuple(f"node{number}" for number in range(draw(st.integers(1, 4))))
    node, device = draw(st.sampled_from(nodes)), draw(st.integers(0, 2))
    spacing = st.floats(0.6, 4.0)
    events: list[WorkerCrashed | Lost | Joined | MasterCrashed] = []
    now_s = BEGIN_S
    for _ in range(FAILING):
        now_s += draw(spacing)
        events.append(WorkerCrashed(t_s=now_s, node=node, device=device))
    if len(nodes) > 2 and draw(st.booleans()):
        other = draw(st.sampled_from([each for each in nodes if each != node]))
        lost_s = draw(st.floats(BEGIN_S, now_s))
        events += [Lost(t_s=lost_s, node=other), Joined(t_s=lost_s + draw(st.floats(0.5, 10.0)), node=other)]
    if draw(st.integers(0, 2)) == 0:
        events.append(MasterCrashed(t_s=draw(st.floats(BEGIN_S, now_s)), down_s=draw(st.floats(0.1, 3.0))))
    events.sort(key=lambda event: event.t_s)
    return Trace(duration_s=now_s + QUIET_S, nodes=nodes, start=nodes, events=tuple(events)), node, device


FAILING = 10
"""So many times a device ends its worker: more often than a node is started again, even where some come too early."""


ONLY_NODE_FAILS_BEFORE_A_STEP = Trace(
    duration_s=76.0,
    nodes=("node0",),
    start=("node0",),
    events=tuple(WorkerCrashed(t_s=7.0 + number, node="node0", device=0) for number in range(FAILING)),
)
"""It comes back with two of its three devices, and no layer is lost with it: all can be made again."""


@examples(12)
@example(failing=(ONLY_NODE_FAILS_BEFORE_A_STEP, "node0", 0), schedule="1f1b", seed=0)
@given(failing=failing_devices(), schedule=st.sampled_from(("1f1b", "auto")), seed=seeds)
def test_a_device_that_fails_for_good_idles_no_other(
    failing: tuple[Trace, str, int], schedule: ScheduleName, seed: int
):
    trace, node, device = failing
    threshold = min(1, len(trace.nodes) - 1)
    setting = replace(PLAIN, devices=3, layers_per_device=2, schedule=schedule, fault_threshold=threshold)
    played = play(trace, setting, seed)
    assert played.end.exit_code == 0, played.end.reason
    taken_in = [entry.node.devices for entry in played.entries if isinstance(entry, NodeAdded)]
    others = tuple(each for each in range(3) if each != device)
    assert others in taken_in
    plan = [entry for entry in played.entries if isinstance(entry, PlanAdopted)][-1].plan
    used = {each.node for each in plan.worker_ids} | set(plan.spares)
    assert node in used, "its other devices train, or wait as spares"
    assert not any(each == WorkerId(node, 2) for each in plan.worker_ids)


RESTART_THAT_IS_REPORTED_AGAIN = Trace(
    duration_s=47.0,
    nodes=("node0", "node1"),
    start=("node0", "node1"),
    events=(
        WorkerCrashed(t_s=6.0, node="node0"),
        WorkerCrashed(t_s=7.0, node="node0"),
        ForkServerCrashed(t_s=7.0, node="node1"),
        ForkServerCrashed(t_s=7.03125, node="node0"),
        MasterCrashed(t_s=7.03125, down_s=1.0),
    ),
)
"""A new master hears of a worker that ended once more, and finds another in the place of one that was to end."""

ENDS_THAT_ARE_REPORTED_AGAIN = Trace(
    duration_s=47.0,
    nodes=("node0", "node1", "node2", "node3"),
    start=("node0", "node1", "node2", "node3"),
    events=(
        WorkerCrashed(t_s=6.625, node="node1"),
        WorkerCrashed(t_s=7.375, node="node1"),
        MasterCrashed(t_s=7.40625, down_s=1.0),
    ),
)
"""A new master hears of two workers again that ended in the same place one after the other."""


@examples(8)
@example(trace=ENDS_THAT_ARE_REPORTED_AGAIN, setting=SHAPES[5], seed=0)
@example(trace=RESTART_THAT_IS_REPORTED_AGAIN, setting=replace(PLAIN, devices=2, layers_per_device=2), seed=0)
@given(trace=crashes(), setting=st.sampled_from((PLAIN, SHAPES[2], SHAPES[5], SHAPES[12])), seed=seeds)
def test_a_run_goes_on_for_as_long_as_its_agents_live(trace: Trace, setting: Setting, seed: int):
    """Whatever ends of workers and fork servers, and however close together: steps are run again at the worst."""
    setting = replace(setting, fault_threshold=min(setting.fault_threshold, len(trace.nodes) - 1))
    if len(trace.nodes) < 2:
        setting = replace(setting, layers_per_device=4)
    played = play(trace, setting, seed)
    assert played.end.exit_code == 0, played.end.reason
    assert not any(isinstance(entry, NodeLost) for entry in played.entries)
    assert played.summary.samples_missing == played.summary.samples_repeated == 0
    committed = sum(isinstance(entry, StepDone) for entry in played.entries)
    assert committed == played.summary.steps_committed + played.summary.steps_lost


@examples(12)
@given(trace=mild_traces(), setting=st.sampled_from((SHAPES[0], SHAPES[1])), seed=seeds)
def test_losing_f_nodes_at_a_time_never_ends_a_run(trace: Trace, setting: Setting, seed: int):
    played = play(trace, setting, seed)
    assert played.end.exit_code == 0, played.end.reason
