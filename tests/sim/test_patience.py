"""No network that is down for a while and no worker that is slow ends a run, in whatever phase it meets them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from oobleck.control.journal import NodeLost, PlanCause, RecoveryStarted, StepDone
from oobleck.sim.cluster.run import ClusterRun
from oobleck.sim.trace import (
    Healed,
    Joined,
    Lost,
    MasterCrashed,
    Partitioned,
    Slowed,
    TraceEvent,
    WorkerCrashed,
)
from tests.sim.promises import check_safety
from tests.sim.virtual import Setting

NODES = ("n0", "n1", "n2", "n3", "n4")
SHORTEST_S, LONGEST_S = 0.1, 60.0
BACK_S = 45.0
"""Within this after a network is back, steps are committed: all are asked again, and slow steps have their time."""
HOUR_S = 3600.0
FACTOR = 1000.0
NUM_STEPS = 30
QUICK, SLOW = range(2), range(2, 20)


def seeded(test):
    """Run a test with twenty seeds, all but two of them where there is time."""
    return pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])(
        test
    )


def phase(rng: Random) -> tuple[float, tuple[TraceEvent, ...]]:
    """When a fault strikes, and what else happens shortly before: a start, a step, a recovery, or none that is calm."""
    at_s = 10.0
    soon_s = at_s + rng.choice((0.001, 0.01, 0.05, 0.3, 1.0))
    match rng.randrange(6):
        case 0:
            return rng.uniform(0.5, 4.0), ()
        case 1:
            return rng.uniform(4.0, 20.0), ()
        case 2:
            return soon_s, (Lost(t_s=at_s, node="n4"),)
        case 3:
            return soon_s, (WorkerCrashed(t_s=at_s, node="n1"),)
        case 4:
            return soon_s, (Lost(t_s=6.0, node="n4"), Joined(t_s=at_s - 4.0, node="n4"))
        case _:
            return soon_s, (MasterCrashed(t_s=at_s, down_s=0.5),)


def play(*events: TraceEvent, until_s: float, seed: int, **fields) -> ClusterRun:
    setting = Setting(
        events=tuple(sorted(events, key=lambda event: event.t_s)),
        num_nodes=len(NODES),
        heartbeat_interval_s=1.0,
        duration_s=until_s,
        orphan_timeout_s=600.0,
        **fields,
    )
    played = setting.run(seed=seed, keep_decisions=True)
    check_safety(played, num_microbatches=setting.job.num_microbatches)
    assert played.end.exit_code == 0, played.end.reason
    return played


def causes(played: ClusterRun) -> list[PlanCause]:
    return [entry.cause for entry in played.entries if isinstance(entry, RecoveryStarted)]


@seeded
def test_a_network_that_is_down_for_up_to_a_minute_ends_no_run(seed: int):
    rng = Random(seed)
    at_s, others = phase(rng)
    back_s = at_s + SHORTEST_S * (LONGEST_S / SHORTEST_S) ** rng.random()
    islands: dict[int, list[str]] = {}
    for node in NODES:
        islands.setdefault(rng.randrange(rng.choice((2, 3, 5))), []).append(node)
    cuts = [Partitioned(t_s=at_s, nodes=tuple(nodes), spares_master=True) for nodes in islands.values()]
    until_s = back_s + BACK_S
    played = play(*others, *cuts, Healed(t_s=back_s), until_s=until_s, seed=seed, slowness=rng.choice((1.0, 20.0)))
    steps_s = [entry.t_s for entry in played.entries if isinstance(entry, StepDone)]
    assert steps_s[-1] > until_s - 15.0, "it goes on"
    lost = {entry.node for entry in played.entries if isinstance(entry, NodeLost)}
    assert len(lost - {"n4"}) <= 1, "no more than f allows, besides the node that is gone"


@pytest.mark.slow
@seeded
def test_workers_that_are_slow_for_an_hour_are_not_taken_for_stuck(seed: int):
    """Each step that such a worker has a part in takes 25 minutes, and the others a second and a half."""
    rng = Random(seed)
    at_s, others = phase(rng)
    slow = [Slowed(t_s=at_s, node=node, factor=FACTOR) for node in rng.sample(NODES[:4], rng.randint(1, 4))]
    well = [replace(event, t_s=at_s + HOUR_S, factor=1.0) for event in slow]
    played = play(*others, *slow, *well, until_s=3 * HOUR_S, seed=seed, slowness=4.0, max_steps=NUM_STEPS)
    assert not {PlanCause.HANG, PlanCause.PEER_FAILED, PlanCause.NETWORK}.intersection(causes(played))
    assert len([entry for entry in played.entries if isinstance(entry, StepDone)]) == NUM_STEPS
