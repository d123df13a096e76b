"""Failure domains in traces: drawn, written, and lost at once without a step lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import PlanAdopted
from oobleck.errors import ConfigError
from oobleck.sim import simulate
from oobleck.sim.sweep import SweepSettings, sweep
from oobleck.sim.trace import (
    FailureModel,
    Joined,
    Lost,
    Trace,
    TraceEvent,
    generate,
    model_of,
    trace_from_json,
    trace_to_json,
)
from tests.examples import examples
from tests.planner.drawing import uniform_profile

SETTINGS = SweepSettings(profile=uniform_profile(4, memory_bytes=40, seconds=0.5), global_batch_size=8)
"""Two nodes hold the model."""
RACKS = {"node0": "left", "node2": "left", "node1": "right", "node3": "right"}
FOUR = tuple(sorted(RACKS))
MODEL = FailureModel(mean_lifetime_s=4000.0, batches={1: 3, 2: 1}, repairs=((1.0, 300.0),), domain_share=0.3)


def trace_of(*events: TraceEvent, domains: dict[str, str] = RACKS) -> Trace:
    return Trace(duration_s=300.0, nodes=FOUR, start=FOUR, events=events, domains=domains)


LOSSES = (
    *(Lost(t_s=60.0, node=node) for node in ("node0", "node2")),
    *(Joined(t_s=120.0, node=node) for node in ("node0", "node2")),
    *(Lost(t_s=200.0, node=node) for node in ("node1", "node3")),
)


@pytest.mark.parametrize("mode", ["sweep", "cluster"])
def test_no_step_is_lost_with_one_of_two_racks(mode: Literal["sweep", "cluster"]) -> None:
    known, unknown = (
        simulate(trace_of(*LOSSES, domains=domains), SETTINGS, mode=mode).summary for domains in (RACKS, {})
    )
    assert known.steps_lost == 0
    assert known.exit_code == 0
    # It goes back to a checkpoint, or ends where there is none.
    assert unknown.steps_lost > 0 or unknown.exit_code > 0
    assert [recovery.action for recovery in known.recoveries if recovery.cause == "connection_lost"] == [
        "reinstantiate",
        "reinstantiate",
    ]


@examples(25)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=4),
    seed=st.integers(0, 1000),
    share=st.sampled_from((0.5, 1.0)),
)
def test_no_step_is_lost_whichever_rack_fails_as_long_as_plans_say_so(
    sizes: list[int], seed: int, share: float
) -> None:
    domains = [f"rack{rack}" for rack, size in enumerate(sizes) for _ in range(size)]
    model = replace(MODEL, batches={1: 1.0}, domain_share=share)
    trace = generate(model, num_nodes=len(domains), duration_s=20_000.0, seed=seed, domains=domains)
    is_redundant = True
    lost, exposed = 0, 0
    for entry in sweep(trace, replace(SETTINGS, num_pipelines=None)):
        if isinstance(entry, PlanAdopted):
            if entry.restored_step is not None:
                lost += 1
                exposed += not is_redundant
            is_redundant = entry.redundant
    assert lost == exposed, "only where the plan before said that it has too few copies"


def test_losses_are_drawn_by_domain() -> None:
    domains = [f"rack{number // 4}" if number < 16 else "" for number in range(20)]
    trace = generate(MODEL, num_nodes=20, duration_s=10**6, seed=1, domains=domains)
    number_of = {node: number for number, node in enumerate(trace.nodes)}
    at_once: dict[float, list[str]] = {}
    here, whole, away = set(trace.nodes), 0, {}
    for event in trace.events:
        match event:
            case Lost(t_s=t_s, node=node):
                at_once.setdefault(t_s, []).append(node)
                away[node] = t_s
            case Joined(t_s=t_s, node=node):
                assert t_s - away[node] == pytest.approx(300.0)
            case _:
                pass
    for nodes in at_once.values():
        racks = {domains[number_of[node]] for node in nodes}
        assert len(racks) == 1, "a loss takes nodes of one domain"
        assert len(nodes) == 1 or racks != {""}
        whole += len(nodes) == 4
    assert here >= {node for nodes in at_once.values() for node in nodes}
    # Nodes of no domain fail alone: 30 % of the losses of the others take all four, unless one is away already.
    in_racks = sum(domains[number_of[nodes[0]]] != "" for nodes in at_once.values())
    assert 0.15 < whole / in_racks < 0.35
    rate = sum(map(len, at_once.values())) / (20 * 10**6)
    assert rate == pytest.approx(1 / MODEL.mean_lifetime_s, rel=0.15)


def test_traces_like_one_lose_domains_as_often() -> None:
    domains = [f"rack{number // 4}" for number in range(16)]
    trace = generate(MODEL, num_nodes=16, duration_s=10**6, seed=2, domains=domains)
    model = model_of(trace)
    assert model.domain_share == pytest.approx(0.3, abs=0.08)
    again = generate(model, num_nodes=16, duration_s=10**6, seed=3, domains=domains)
    lost, expected = (
        Counter(Counter(event.t_s for event in each.events if isinstance(event, Lost)).values())[4]
        for each in (again, trace)
    )
    assert lost == pytest.approx(expected, rel=0.3)


def test_a_trace_with_domains_is_read_as_it_was_written() -> None:
    trace = trace_of(*LOSSES, domains={"node0": "left", "node3": "right"})
    assert trace_from_json(trace_to_json(trace)) == trace
    with pytest.raises(ConfigError, match="domains names 'node9', which is not among the trace's nodes"):
        trace_of(domains={"node9": "left"})
    text = trace_to_json(trace).replace('"right": ["node3"]', '"right": ["node0"]')
    with pytest.raises(ConfigError, match="domains: 'node0' is of left and of right; name it once"):
        trace_from_json(text)


def test_domains_draw_nothing_where_there_are_none() -> None:
    model = replace(MODEL, domain_share=0.0)
    plain = generate(model, num_nodes=8, duration_s=10**5, seed=4)
    assert generate(MODEL, num_nodes=8, duration_s=10**5, seed=4) == plain
    with pytest.raises(ConfigError, match="domains is 1; it must be one for each node"):
        generate(model, num_nodes=8, duration_s=10**5, seed=4, domains=["left"])
