from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import ConfigError
from oobleck.sim.trace import Joined, Lost, Noticed, Slowed, trace_from_json, trace_to_json
from oobleck.sim.trace.facts import facts_of
from oobleck.sim.trace.generate import PRESETS, FailSlow, FailureModel, generate

DAY_S = 86_400.0
ALONE = FailureModel(mean_lifetime_s=10 * DAY_S, batches={1: 1.0})


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_loses_nodes_at_its_published_rate(name: str) -> None:
    model = PRESETS[name]
    days = 3 if name.startswith("spot") else 400
    facts = facts_of(generate(model, num_nodes=400, duration_s=days * DAY_S, seed=1))
    assert facts.losses_per_node_hour == pytest.approx(3600 / model.mean_lifetime_s, rel=0.15)
    assert facts.source.startswith(model.source)


def test_batches_come_as_often_as_their_weights_say() -> None:
    model = replace(ALONE, batches={1: 3.0, 4: 1.0}, repairs=((1.0, 60.0),))
    sizes = facts_of(generate(model, num_nodes=100, duration_s=400 * DAY_S, seed=2)).losses_at_once
    assert set(sizes) == {1, 4}
    assert sizes[1] / sizes[4] == pytest.approx(3, rel=0.15)


def test_lifetimes_of_a_shape_below_one_are_short_more_often() -> None:
    def share_of_short(shape: float) -> float:
        model = replace(ALONE, shape=shape, repairs=((1.0, 1.0),))
        trace = generate(model, num_nodes=200, duration_s=100 * DAY_S, seed=3)
        since: dict[str, float] = {}
        lives = []
        for event in trace.events:
            match event:
                case Joined(t_s=t_s, node=node):
                    since[node] = t_s
                case Lost(t_s=t_s, node=node):
                    lives.append(t_s - since.get(node, 0.0))
                case _:
                    pass
        return sum(life < DAY_S for life in lives) / len(lives)

    assert share_of_short(0.5) > 1.5 * share_of_short(1.0)


def test_repairs_follow_their_quantiles() -> None:
    facts = facts_of(generate(PRESETS["infinitehbd"], num_nodes=400, duration_s=1000 * DAY_S, seed=4))
    assert facts.away_s_median == pytest.approx(20.4 * 3600, rel=0.15)


def test_nodes_without_repair_stay_away() -> None:
    trace = generate(ALONE, num_nodes=5, duration_s=1000 * DAY_S, seed=5)
    assert Counter(map(type, trace.events)) == {Lost: 5}


def test_every_loss_is_noticed_as_early_as_promised_or_as_the_node_is_there() -> None:
    model = replace(ALONE, repairs=((1.0, 60.0),), notice_s=120.0)
    trace = generate(model, num_nodes=20, duration_s=100 * DAY_S, seed=6)
    notices = [event for event in trace.events if isinstance(event, Noticed)]
    losses = [event for event in trace.events if isinstance(event, Lost)]
    assert {(n.node, round(n.t_s + n.grace_s, 6)) for n in notices} == {(e.node, round(e.t_s, 6)) for e in losses}
    assert max(notice.grace_s for notice in notices) == pytest.approx(120)


def test_slow_nodes_become_well_again() -> None:
    slow = FailSlow(rate_per_node_hour=0.1, mean_duration_s=1800, least_factor=1.2, most_factor=1.5)
    trace = generate(replace(ALONE, mean_lifetime_s=1e9, fail_slow=slow), num_nodes=10, duration_s=10 * DAY_S, seed=7)
    factors = [event.factor for event in trace.events if isinstance(event, Slowed)]
    begun = [factor for factor in factors if factor != 1]
    assert all(1.2 <= factor <= 1.5 for factor in begun)
    assert len(begun) == pytest.approx(10 * 240 * 0.1, rel=0.3)
    assert factors.count(1.0) >= 0.8 * len(begun)


@given(
    preset=st.sampled_from(sorted(PRESETS)),
    num_nodes=st.integers(1, 12),
    duration_s=st.floats(1, 30 * DAY_S),
    seed=st.integers(0, 2**40),
    notice_s=st.none() | st.floats(0, 1000),
    shape=st.floats(0.3, 4),
)
def test_whatever_is_drawn_is_a_trace_and_is_drawn_again(
    preset: str, num_nodes: int, duration_s: float, seed: int, notice_s: float | None, shape: float
) -> None:
    slow = FailSlow(rate_per_node_hour=0.05, mean_duration_s=600, least_factor=1, most_factor=3)
    model = replace(PRESETS[preset], notice_s=notice_s, shape=shape, fail_slow=slow)
    trace = generate(model, num_nodes=num_nodes, duration_s=duration_s, seed=seed)
    assert trace_from_json(trace_to_json(trace)) == trace
    assert generate(model, num_nodes=num_nodes, duration_s=duration_s, seed=seed) == trace


def test_another_process_with_another_hash_seed_draws_the_same() -> None:
    program = (
        "from oobleck.sim.trace.generate import *; from oobleck.sim.trace import trace_to_json; import sys;"
        "sys.stdout.write(trace_to_json(generate(PRESETS['spot-p3'], num_nodes=20, duration_s=86400, seed=9)))"
    )
    digests = set()
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=environment)
        digests.add(hashlib.sha256(done.stdout).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean_lifetime_s": 0}, "mean_lifetime_s is 0; it must be above 0"),
        ({"shape": 0}, "shape is 0"),
        ({"batches": {}}, "batches is {}"),
        ({"batches": {0: 1.0}}, "sizes from 1 to"),
        ({"batches": {1: 0.0}}, "weights above 0"),
        ({"notice_s": -1}, "notice_s is -1"),
        ({"repairs": ((1.0, 0.0),)}, "repairs is"),
    ],
)
def test_an_impossible_model_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(ALONE, **changes)  # type: ignore[arg-type]
