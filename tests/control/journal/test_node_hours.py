from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import (
    Action,
    ConnectionLost,
    JobEnded,
    JournalEntry,
    Loss,
    LossCause,
    NodeConnected,
    NodeLeft,
    NodeLost,
    PlanCause,
    RecoveryStarted,
    Unfit,
)
from oobleck.control.journal.goodput import NodeAccount, NodeHours
from oobleck.control.journal.summary import summarize
from tests.control.journals import adopted, committed, plan, recovered, run_with_a_loss

LOST = ConnectionLost()

HOUR_S = 3600.0
FOUR = ("node0", "node1", "node2", "node3")
TWO = plan(("node0", "node1"), ("node2", "node3"))


def account_of(*entries: JournalEntry) -> NodeAccount:
    account = NodeAccount()
    for entry in entries:
        account.apply(entry)
    return account


def connected(t_s: float, *nodes: str) -> list[JournalEntry]:
    return [NodeConnected(t_s=t_s, node=node, agent_pid=1) for node in nodes]


def lost(t_s: float, node: str, loss: Loss = LOST) -> NodeLost:
    return NodeLost(t_s=t_s, node=node, loss=loss)


def hours(seconds: NodeHours) -> NodeHours:
    """What was written down in seconds."""
    names = ("there", "training", "recovering", "idle", "other")
    return NodeHours(**{name: getattr(seconds, name) / HOUR_S for name in names})


def check(found: NodeHours, seconds: NodeHours) -> None:
    expected = hours(seconds)
    for name in ("there", "training", "recovering", "idle", "other"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_nodes_that_start_together_and_train_on() -> None:
    account = account_of(*connected(1.0, *FOUR), adopted(5.0, 1, TWO), committed(11.0, 1, duration_s=1.0))
    check(account.at(11.0), NodeHours(there=40, training=4, other=36))
    check(account.at(21.0), NodeHours(there=80, training=44, other=36))


def test_a_node_that_stands_by_is_idle_and_counts_no_longer_once_it_is_gone() -> None:
    spare = plan(("node0", "node1"), spares=("node2",))
    start = [*connected(0.0, *FOUR[:3]), adopted(0.0, 1, spare), committed(10.0, 1, duration_s=10.0)]
    check(account_of(*start).at(10.0), NodeHours(there=30, training=20, idle=10))
    check(account_of(*start, lost(12.0, "node2")).at(20.0), NodeHours(there=52, training=40, idle=12))
    left = NodeLeft(t_s=12.0, node="node2")
    check(account_of(*start, left).at(20.0), NodeHours(there=52, training=40, idle=12))


def test_an_unfit_node_stays_and_idles_until_it_is_well() -> None:
    both = plan(("node0",), ("node1",))
    alone = plan(("node0",))
    entries = [
        *connected(0.0, "node0", "node1"),
        adopted(0.0, 1, both),
        committed(10.0, 1, duration_s=10.0),
        lost(10.0, "node1", Unfit(fault="no memory")),
        adopted(10.0, 2, alone, Action.REBUILD),
        committed(20.0, 2, 2, duration_s=10.0),
    ]
    check(account_of(*entries).at(20.0), NodeHours(there=40, training=30, idle=10))
    again = [*connected(20.0, "node1"), adopted(20.0, 3, both, Action.ABSORB), committed(30.0, 3, 3, duration_s=10.0)]
    check(account_of(*entries, *again).at(30.0), NodeHours(there=60, training=50, idle=10))


def test_a_stall_is_paid_for_by_the_nodes_that_are_left() -> None:
    entries = [
        *connected(0.0, *FOUR),
        adopted(0.0, 1, TWO),
        committed(10.0, 1, duration_s=10.0),
        lost(10.0, "node3"),
        RecoveryStarted(t_s=10.0, generation=2, nodes=("node3",), cause=PlanCause.LOSS, loss=LossCause.CONNECTION_LOST),
        adopted(10.0, 2, plan(("node0", "node1"), ("node2",)), Action.REINSTANTIATE),
        committed(20.0, 2, 2, duration_s=10.0),
        recovered(20.0, 2, "node3", stall_s=4.0),
        JobEnded(t_s=21.0, exit_code=0, reason="done"),
    ]
    check(account_of(*entries).at(21.0), NodeHours(there=73, training=58, recovering=12, other=3))


def test_steps_that_are_run_again_count_as_recovering() -> None:
    entries = [*connected(0.0, *FOUR), adopted(0.0, 1, TWO), committed(10.0, 5, duration_s=10.0)]
    check(
        account_of(*entries, committed(12.0, 5, duration_s=2.0)).at(12.0),
        NodeHours(there=48, training=40, recovering=8),
    )


def test_without_a_plan_all_are_idle() -> None:
    entries = [*connected(0.0, *FOUR), adopted(0.0, 1, TWO), committed(10.0, 1, duration_s=10.0)]
    none = adopted(10.0, 2, plan(), Action.CHECKPOINT)
    check(account_of(*entries, none, lost(15.0, "node0")).at(20.0), NodeHours(there=75, training=40, idle=35))


@given(lost_at=st.integers(1, 110), cut_off=st.one_of(st.none(), st.floats(0.0, 70.0)), num_pipelines=st.integers(2, 4))
def test_the_parts_sum_to_what_was_there_at_any_moment(lost_at: int, cut_off: float | None, num_pipelines: int) -> None:
    entries = list(run_with_a_loss(num_pipelines, lost_at=lost_at))
    if cut_off is not None:
        entries = [entry for entry in entries if entry.t_s <= cut_off]
    summary = summarize(entries)
    found = summary.node_hours
    assert found is not None
    parts = (found.training, found.recovering, found.idle, found.other)
    assert min(parts) >= -1e-12
    assert sum(parts) == pytest.approx(found.there)
    since_s = {entry.node: entry.t_s for entry in entries if isinstance(entry, NodeConnected)}
    until_s = {entry.node: entry.t_s for entry in entries if isinstance(entry, NodeLost)}
    there_s = sum(until_s.get(node, summary.elapsed_s) - start_s for node, start_s in since_s.items())
    assert found.there == pytest.approx(there_s / HOUR_S)
    assert found.per_step == (pytest.approx(found.there / summary.steps_committed) if summary.steps_committed else None)


def test_the_summary_says_what_was_got_for_them() -> None:
    summary = summarize(run_with_a_loss())
    found = summary.node_hours
    assert found is not None
    tokens = 120 * 2048
    assert found.per_million_tokens == pytest.approx(found.there / (tokens / 1e6))
    assert summary.to_dict()["node_hours"] == {
        name: getattr(found, name)
        for name in ("there", "training", "recovering", "idle", "other", "per_step", "per_million_tokens")
    }
    assert replace(summary, node_hours=None).to_dict()["node_hours"] is None
