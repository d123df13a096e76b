from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from oobleck.errors import ConfigError
from oobleck.sim import Mean, repeat, simulate
from oobleck.sim.costs import Outcome
from oobleck.sim.policies import POLICIES
from oobleck.sim.sweep import SweepSettings
from oobleck.sim.trace import FailureModel, Frozen, Joined, Lost, Trace, facts_of, generate, model_of
from oobleck.ui.pictures import outcomes_svg
from tests.planner.drawing import uniform_profile

NODES = tuple(f"node{number}" for number in range(4))
TRACE = Trace(
    duration_s=3600.0,
    nodes=NODES,
    start=NODES,
    events=(Lost(t_s=600.0, node="node1"), Joined(t_s=1200.0, node="node1")),
)
SETTINGS = SweepSettings(profile=uniform_profile(4, memory_bytes=80, seconds=0.5), global_batch_size=8)
MODEL = FailureModel(mean_lifetime_s=4000.0, batches={1: 3, 2: 1}, repairs=((1.0, 300.0),))


def test_one_call_is_a_run_of_any_policy_or_mode() -> None:
    for policy in POLICIES:
        outcome = simulate(TRACE, SETTINGS, policy)
        assert (outcome.policy, outcome.summary.elapsed_s) == (policy, pytest.approx(3600))
    in_cluster = simulate(TRACE, SETTINGS, mode="cluster").summary
    assert in_cluster.steps_committed == pytest.approx(simulate(TRACE, SETTINGS).summary.steps_committed, rel=0.02)
    with pytest.raises(ConfigError, match="policy is 'magic'; it must be one of oobleck, restart"):
        simulate(TRACE, SETTINGS, "magic")


@pytest.mark.parametrize("policy", ["oobleck", "varuna"])
def test_an_outcome_is_read_as_it_was_written(policy: str) -> None:
    outcome = simulate(TRACE, SETTINGS, policy)
    written = json.loads(json.dumps(outcome.to_dict(), allow_nan=False))
    assert Outcome.from_dict(written) == outcome
    del written["stretches"]
    with pytest.raises(ConfigError, match=r"the outcome: .*stretches"):
        Outcome.from_dict(written)


def test_seeds_give_a_mean_with_the_interval_of_students_t() -> None:
    # By the textbook: 2, 4 and 6 have a mean of 4 and a deviation of 2; t is 4.303 for two degrees of freedom.
    mean = Mean.of([2.0, 4.0, 6.0])
    assert mean.value == 4
    assert mean.half_width == pytest.approx(4.303 * 2 / math.sqrt(3))
    assert Mean.of([5.0]).half_width is None

    def make_trace(seed: int) -> Trace:
        return generate(MODEL, num_nodes=6, duration_s=20_000.0, seed=seed)

    repeated = repeat(make_trace, SETTINGS, "restart", seeds=range(4))
    singly = [simulate(make_trace(seed), SETTINGS, "restart").samples_per_s for seed in range(4)]
    assert repeated.samples_per_s == Mean.of(singly)
    assert repeated.samples_per_s.half_width
    with pytest.raises(ConfigError, match="seeds is empty"):
        repeat(make_trace, SETTINGS, seeds=[])


def test_traces_are_drawn_like_one() -> None:
    trace = generate(MODEL, num_nodes=40, duration_s=400_000.0, seed=1)
    like = generate(model_of(trace), num_nodes=40, duration_s=400_000.0, seed=2)
    ours, theirs = facts_of(trace), facts_of(like)
    assert like.events != trace.events
    assert theirs.losses_per_node_hour == pytest.approx(ours.losses_per_node_hour, rel=0.1)
    away_s = {event.node: event.t_s for event in like.events[:1]}
    returned = next(event for event in like.events if isinstance(event, Joined) and event.node in away_s)
    assert returned.t_s - away_s[returned.node] == pytest.approx(300, rel=0.01)
    for wrong, problem in (
        (replace(TRACE, start=NODES[:3], events=()), "not all of the trace's nodes are there at the start"),
        (replace(TRACE, events=()), "the trace has no losses"),
        (replace(TRACE, events=(Frozen(t_s=1.0, node="node1"),)), "an event node_frozen"),
    ):
        with pytest.raises(ConfigError, match=problem):
            model_of(wrong)


def test_outcomes_are_drawn_by_one_call() -> None:
    picture = outcomes_svg([simulate(TRACE, SETTINGS, name) for name in ("oobleck", "restart")], TRACE, title="two")
    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    assert {"two", "oobleck", "restart", "samples/s"} <= set(texts)
