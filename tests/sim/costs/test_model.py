from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import summarize
from oobleck.errors import ConfigError
from oobleck.planner import device_sheet, estimate_profile, model_shape
from oobleck.sim.cluster.run import run_cluster
from oobleck.sim.costs.model import Costs, changes_from_json, costs_for, with_changes
from oobleck.sim.sweep.settings import SweepSettings
from oobleck.sim.sweep.sweep import sweep
from oobleck.sim.trace import Lost, Trace
from tests.planner.drawing import uniform_profile

COSTS = Costs()
counts = st.integers(1, 20_000)


@given(few=counts, more=counts)
def test_no_cost_falls_as_the_cluster_grows(few: int, more: int):
    few, more = sorted((few, more))
    for cost_s in (COSTS.asking_s, COSTS.deciding_s, COSTS.ordering_s, COSTS.committing_s, COSTS.starting_s):
        assert 0 <= cost_s(few) <= cost_s(more)
    assert COSTS.forming_s((few, 2)) <= COSTS.forming_s((more, 2))


@given(num_workers=st.integers(2, 20_000))
def test_a_commit_has_two_hops_a_doubling_of_the_workers(num_workers: int):
    doublings = next(number for number in range(20) if 2**number >= num_workers)
    assert COSTS.committing_s(num_workers) == pytest.approx((2 * doublings + 4) * COSTS.commit_hop_s)


def test_one_worker_alone_agrees_with_itself_at_once():
    assert COSTS.committing_s(1) == 0


def test_deciding_for_a_large_cluster_takes_as_long_as_was_measured():
    assert COSTS.deciding_s(2048) == pytest.approx(0.059, rel=0.2)


def test_ten_thousand_workers_recover_in_about_the_time_of_few():
    assert COSTS.forming_s((10_000, 1_250)) == COSTS.forming_s((64, 8))
    assert COSTS.committing_s(10_000) < 0.005


def read_changes(text: str) -> dict[str, float]:
    return changes_from_json(text, policies=("restart", "varuna"), source="c.json")


@pytest.mark.parametrize("name", [part.name for part in fields(Costs)])
def test_every_cost_can_be_set_by_a_file_and_is_a_number_of_at_least_0(name: str):
    assert getattr(with_changes(COSTS, read_changes(f'{{"{name}": 7}}'), policy="restart"), name) == 7
    own = read_changes(f'{{"varuna.{name}": 9, "{name}": 8}}')
    assert [getattr(with_changes(COSTS, own, policy=policy), name) for policy in ("varuna", "restart")] == [9, 8]
    with pytest.raises(ConfigError, match=rf"c\.json: {name} is -1\.0"):
        read_changes(f'{{"{name}": -1}}')
    with pytest.raises(ConfigError, match=rf"{name} is -1\.0"):
        read_changes(f'{{"varuna.{name}": -1}}')
    with pytest.raises(ConfigError, match=rf"{name} is 'much'"):
        read_changes(f'{{"{name}": "much"}}')
    with pytest.raises(ConfigError, match=f"{name} is inf"):
        read_changes(f'{{"{name}": 1e999}}')


def test_a_number_of_nodes_is_whole():
    with pytest.raises(ConfigError, match=r"swap_spares is 1\.5; it must be a whole number"):
        read_changes('{"swap_spares": 1.5}')


def test_groups_are_formed_by_nccl_where_the_profile_is_of_gpus():
    on = {
        name: estimate_profile(model_shape("gpt2"), device_sheet(name), microbatch_size=1, sequence_length=64)
        for name in ("A100", "CPU")
    }
    assert costs_for(on["CPU"]) == COSTS
    assert costs_for(on["A100"]) == replace(COSTS, form_s=1.6)
    settings = SweepSettings(profile=on["A100"], global_batch_size=8)
    assert settings.costs.form_s == 1.6
    assert replace(settings, costs=Costs()).costs == COSTS  # costs that are given stay as they are


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"form": 5}', r"c\.json: the file: unknown key 'form'; did you mean 'form_s'\?"),
        ("[5]", r"c\.json: the file must be an object"),
        ("{", r"c\.json: not JSON"),
        ('{"form_s": 5, "form_s": 6}', r"c\.json: not JSON: a map has a key twice"),
    ],
)
def test_a_bad_file_is_named_with_the_key(text: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        read_changes(text)


NODES = tuple(f"node{index}" for index in range(4))
PROFILE = uniform_profile(4, memory_bytes=80, seconds=0.5)
TRACE = Trace(duration_s=600.0, nodes=NODES, start=NODES, events=(Lost(t_s=200.0, node="node1"),))
ALIGNED = replace(COSTS, node_start_s=3.952, node_start_node_s=0.0, checkpoint_write_s=0.0)
"""Virtual nodes are up after as long, so that the loss meets the same part of a step in both modes; the cluster mode
writes no checkpoints."""


def stalls_s_and_steps(costs: Costs) -> tuple[tuple[float, float], tuple[int, int]]:
    settings = SweepSettings(profile=PROFILE, global_batch_size=8, costs=costs)
    swept = summarize(sweep(TRACE, settings))
    played = run_cluster(TRACE, job=settings.job(10**6, is_timed=True), profile=PROFILE, costs=costs).summary
    (one,), (other,) = swept.recoveries, played.recoveries
    return (one.stall_s, other.stall_s), (swept.steps_committed, played.steps_committed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [("form_s", 5.0), ("decide_s", 6.0), ("fence_s", 7.0), ("update_bytes", 4e7), ("commit_hop_s", 0.5)],
)
def test_both_modes_charge_the_same_for_what_a_user_sets(name: str, value: float):
    costs = replace(ALIGNED, **{name: value})
    before, after = stalls_s_and_steps(ALIGNED)[0], stalls_s_and_steps(costs)
    swept_s, played_s = (one_s - other_s for one_s, other_s in zip(after[0], before, strict=True))
    if name != "commit_hop_s":  # which is a part of the step
        assert swept_s > 1
        assert played_s == pytest.approx(swept_s, abs=0.1)
    assert after[1][0] == pytest.approx(after[1][1], abs=2)  # a run that is stopped ends its step
