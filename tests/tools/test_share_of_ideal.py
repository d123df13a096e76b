from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.sim.policies.throughput import Plans
from oobleck.sim.sweep.sweep import sweep
from oobleck.sim.trace import Joined, Lost, Trace
from tests.sim.policies.test_policies import JOB
from tools.paper import share_of_ideal

NODES = tuple(f"node{number}" for number in range(8))


def trace(*events) -> Trace:
    return Trace(duration_s=20_000.0, nodes=NODES, start=NODES, events=events)


def share(played: Trace, **options) -> float:
    settings = replace(JOB, **options)
    return share_of_ideal(sweep(played, settings), played, Plans(settings))


def test_without_a_failure_a_run_is_ideal():
    costs = replace(JOB.costs, checkpoint_write_s=0.0)
    # but for the first plan's adoption, and the commits
    assert share(trace(), costs=costs) == pytest.approx(1.0, abs=1e-3)
    assert share(trace()) < share(trace(), costs=costs), "saves take time"


def test_failures_cost_something_and_never_give_anything():
    events = [Lost(t_s=2000.0 * number, node=NODES[number]) for number in (1, 2, 3)]
    assert 0.9 < share(trace(*events, Joined(t_s=9000.0, node=NODES[1]))) < 1.0


def test_a_run_without_a_step_has_no_share():
    assert share_of_ideal((), trace(), Plans(JOB)) == 0.0
