"""Runs whose agents speak through each other: what happens is what happens without relays, in fewer messages.

With a fan-out of 2, positions 0 and 1 speak to the master, 2 and 3 to 0, 4 and 5 to 1, 6 and 7 to 2, 8 and 9 to 3, …
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.events import BatchReceived, MessageReceived, NodesHeard
from oobleck.control.journal import (
    JournalEntry,
    LossCause,
    NodeConnected,
    NodeLeft,
    NodeLost,
    PlanCause,
    RecoveryDone,
    StepDone,
    WorkerDown,
)
from oobleck.control.protocol import Heartbeat, Status, StepCommitted
from oobleck.control.relaying import children_of
from oobleck.sim.cluster.run import ClusterRun, run_cluster
from oobleck.sim.trace import (
    AgentCrashed,
    AgentFrozen,
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
from tests.sim.promises import check_liveness, check_safety
from tests.sim.strategies import traces
from tests.sim.virtual import Setting

SETTING = Setting(
    num_nodes=12,
    layers_per_device=2,
    num_pipelines=6,
    relay_nodes=4,
    relay_fanout=2,
    slowness=20.0,  # between two steps, heartbeats want no answer
    duration_s=60.0,
)
LEASE_S = SETTING.job.control.lease_s
T = 20.0
"""By then, all have their relays."""
LONGER_S = 0.05
"""Three levels may take so much longer: each waits 5 ms for equal answers, and a lost relay costs one round trip."""


def run(*events: TraceEvent, **fields) -> ClusterRun:
    played = replace(SETTING, events=events, **fields).run(keep_decisions=True)
    check_safety(played, num_microbatches=SETTING.shape.num_microbatches)
    assert played.end.exit_code == 0, played.end.reason
    return played


def entries(played: ClusterRun, kind: type, *, since_s: float = T) -> list[JournalEntry]:
    return [entry for entry in played.entries if isinstance(entry, kind) and entry.t_s >= since_s]


def lost(played: ClusterRun) -> list[str]:
    return [entry.node for entry in entries(played, NodeLost)]


@cache
def nodes_by_position() -> tuple[str, ...]:
    """Agents take their positions in the order in which they come; it is the same in all runs of this setting."""
    connected = [entry for entry in run().entries if isinstance(entry, NodeConnected)]
    return tuple(entry.node for entry in connected)


def at(position: int) -> str:
    return nodes_by_position()[position]


def roots(played: ClusterRun, since_s: float, until_s: float) -> set[str]:
    """The nodes whose heartbeats came one by one: those of all others come together, but for some that ask."""
    events = [each.event for each in played.decisions if since_s <= each.now_s < until_s]
    alive = Heartbeat(sequence=None)
    return {event.node for event in events if isinstance(event, MessageReceived) and event.message == alive}


def speakers(played: ClusterRun, kind: type, since_s: float) -> list[str]:
    """The nodes from which messages of a kind came one by one."""
    events = [each.event for each in played.decisions if each.now_s >= since_s]
    return [event.node for event in events if isinstance(event, MessageReceived) and isinstance(event.message, kind)]


def test_all_are_heard_through_two_agents():
    played = run()
    assert lost(played) == []
    spoke_directly = {each.event.node for each in played.decisions if isinstance(each.event, MessageReceived)}
    assert spoke_directly == set(nodes_by_position()), "at first"
    assert roots(played, T, 50.0) == {at(0), at(1)}
    heard = {node for each in played.decisions if isinstance(each.event, NodesHeard) for node, _ in each.event.heard}
    assert heard == set(nodes_by_position())
    steps = entries(played, StepDone)
    assert len(speakers(played, StepCommitted, T)) < 6 * len(steps), "of many who say so, a relay passes on one"


def test_equal_answers_come_together():
    played = run(Lost(t_s=T, node=at(11)))
    batches = [each.event for each in played.decisions if isinstance(each.event, BatchReceived) and each.now_s > T]
    answers = [event for event in batches if isinstance(event.message, Status)]
    assert max(len(event.worker_ids) for event in answers) > 1
    assert len(answers) + len(speakers(played, Status, T)) < 11, "there are eleven survivors"


@pytest.mark.parametrize("position", [0, 2, 5, 11])
def test_a_lost_node_costs_no_more_for_being_a_relay(position: int):
    loss = Lost(t_s=T, node=at(position))
    played, without = run(loss), run(loss, relay_nodes=0)
    assert lost(played) == lost(without) == [at(position)]
    (recovery,), (other,) = entries(played, RecoveryDone), entries(without, RecoveryDone)
    assert recovery.steps_lost == other.steps_lost == 0
    assert recovery.generation == other.generation, "one, whatever the relay had under way"
    below = {at(child) for child in children_of(position, SETTING.relay_fanout) if child < SETTING.num_nodes}
    assert below <= set(speakers(played, Status, T)), "they answer directly, in the same recovery"
    assert recovery.decide_s < other.decide_s + LONGER_S


@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_frozen_relay_is_lost_alone_and_in_time(position: int):
    played = run(Frozen(t_s=T, node=at(position)))
    (entry,) = entries(played, NodeLost)
    assert (entry.node, entry.loss.cause) == (at(position), LossCause.LEASE_EXPIRED)
    assert entry.t_s <= T + LEASE_S + 0.5
    assert entries(played, RecoveryDone)[0].steps_lost == 0


@pytest.mark.parametrize("position", [0, 2])
def test_a_relay_whose_agent_stops_for_a_while_costs_nobody(position: int):
    played = run(AgentFrozen(t_s=T, node=at(position), frozen_s=LEASE_S - 1.0), duration_s=120.0)
    assert lost(played) == []
    assert entries(played, RecoveryDone) == []
    assert roots(played, T + 5.0, T + 20.0) >= {at(position)}
    assert roots(played, 110.0, 115.0) == {at(0), at(1)}, "it is used again later"


@pytest.mark.parametrize("position", [2, 6])
def test_what_a_frozen_relay_did_not_pass_on_is_said_again(position: int):
    """A worker ends while nobody hears its agent: that is known once the agent has left its relay."""
    frozen = AgentFrozen(t_s=T, node=at(0), frozen_s=LEASE_S - 1.0)
    played = run(frozen, WorkerCrashed(t_s=T + 0.05, node=at(position), device=0))
    (down,) = entries(played, WorkerDown)
    assert down.node == at(position)
    assert down.t_s < T + frozen.frozen_s
    assert lost(played) == []


def test_a_relay_that_is_cut_off_from_all_is_lost_alone():
    played = run(Partitioned(t_s=T, nodes=(at(0),)), Healed(t_s=T + 6.0))
    assert lost(played) == [at(0)]


def test_relays_that_are_lost_together_are_one_recovery():
    played = run(Lost(t_s=T, node=at(1)), Lost(t_s=T, node=at(4)))
    assert sorted(lost(played)) == sorted([at(1), at(4)])
    assert len(entries(played, RecoveryDone)) == 1


def test_the_place_of_a_lost_relay_is_taken():
    played = run(Lost(t_s=T, node=at(1)), duration_s=60.0)
    assert roots(played, T, T + 4.0) > {at(4), at(5)}
    assert roots(played, 45.0, 55.0) == {at(0), at(11)}


def test_nodes_come_and_leave_through_relays():
    played = run(
        Noticed(t_s=T, node=at(2), grace_s=60.0),
        WorkerCrashed(t_s=T + 6, node=at(9), device=0),
        AgentCrashed(t_s=T + 12, node=at(3)),
        Lost(t_s=T + 18, node=at(6)),
        Joined(t_s=T + 24, node=at(6)),
        duration_s=90.0,
    )
    assert [entry.node for entry in entries(played, NodeLeft)] == [at(2)]
    assert lost(played) == [at(3), at(6)]
    whys = [entry.why for entry in entries(played, RecoveryDone)]
    assert whys.count(PlanCause.JOINED) >= 1


@pytest.mark.parametrize("frozen_s", [2.6, 5.0, 60.0])
def test_a_master_that_stops_for_a_while_loses_nobody(frozen_s: float):
    played = run(MasterFrozen(t_s=T, frozen_s=frozen_s), duration_s=140.0, orphan_timeout_s=600.0)
    assert lost(played) == []


def test_a_master_that_takes_over_reaches_all_directly_and_gives_them_relays_again():
    played = run(MasterCrashed(t_s=T, down_s=2.0))
    assert lost(played) == []
    assert entries(played, RecoveryDone) == []
    assert len(roots(played, T, 30.0)) > 2
    assert len(roots(played, 50.0, 55.0)) == 2


def _end_s(event: TraceEvent) -> float:
    lasts_s: float = getattr(event, "frozen_s", getattr(event, "down_s", 0.0))
    return event.t_s + lasts_s


QUIET_S = 60.0
KINDS = (
    Lost, Joined, Frozen, Thawed, WorkerCrashed, AgentCrashed, AgentFrozen, Noticed, MasterCrashed, MasterFrozen,
    Partitioned, Healed,
)  # fmt: skip
gaps = st.one_of(st.just(0.0), st.floats(0, 0.05), st.floats(0, 1.0), st.floats(0, 8.0))
times = st.lists(gaps, max_size=6).map(lambda waits: [15.0 + sum(waits[: index + 1]) for index in range(len(waits))])


@examples(10)
@given(
    trace=traces(min_nodes=5, max_nodes=8, duration_s=1e6, kinds=KINDS, times=times, all_start=True),
    seed=st.integers(0, 2**16),
)
def test_what_is_promised_holds_with_relays(trace: Trace, seed: int):
    setting = replace(SETTING, slowness=5.0, heartbeat_interval_s=1.0, num_nodes=len(trace.nodes))
    end_s = max([15.0, *map(_end_s, trace.events)])
    played = run_cluster(
        replace(trace, duration_s=end_s + QUIET_S),
        job=setting.job,
        profile=setting.profile,
        seed=seed,
        keep_decisions=True,
    )
    check_safety(played, num_microbatches=setting.shape.num_microbatches)
    check_liveness(played, last_fault_s=end_s, within_s=40.0)
