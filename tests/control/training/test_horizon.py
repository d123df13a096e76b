"""A run weighs copies by the time between its own changes: the job's expectation is only where it begins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.events import AddRequested
from oobleck.control.journal import PlanAdopted, StepDone
from oobleck.job import NodeSpec
from oobleck.planner import Profile
from tests.control.bench import Bench, ready
from tests.control.model import Shape


class Slow(Shape):
    """Pipelines of one node each, and a network on which a node's state takes a minute.

    Steps take 267 s on three nodes and 380 s on two, so a third node pays if it is there for 142 s.
    """

    @property
    def profile(self) -> Profile:
        profile = super().profile
        return replace(profile, network=replace(profile.network, inter_node_bytes_per_s=200.0))


SHAPE = Slow(num_nodes=3, layer_s=30.0, num_microbatches=6, max_steps=10_000)


def answer_all(bench: Bench, *nodes: str) -> None:
    """Answer that each of these holds what the newest plan gives it, and follow the next plan."""
    plan, newest = bench.updates[-1].plan, bench.journal(PlanAdopted)[-1].generation
    layers = {worker_id.node: tuple(sorted(held)) for worker_id, held in plan.layers_at.items()}
    last = bench.journal(StepDone)[-1].record
    for node in nodes:
        adopted = newest if node in layers else 0
        bench.answer(node, adopted=adopted, layers=layers.get(node, ()), applied=last.step, last_record=last)
    bench.wait(0.01)
    bench.resume(*bench.updates[-1].plan.nodes)


def trains_after_a_loss(bench: Bench, number: int) -> bool:
    """Lose a node and add another; returns whether the new one trains."""
    first, second, third = bench.updates[-1].plan.nodes
    bench.fail(third)
    answer_all(bench, first, second)
    assert bench.updates[-1].plan.nodes == (first, second)
    name = f"n{number}"
    bench.feed(AddRequested(spec=NodeSpec(name=name, host=f"host{number}")))
    bench.up(name)
    bench.say(name, ready())
    answer_all(bench, first, second, name)
    return name in bench.updates[-1].plan.nodes


@pytest.mark.parametrize(
    ("expected_s", "apart_s", "trains"),
    [
        # After n changes the mean is (expected_s + time) / (1 + n): at the joins 300, 150 and 100 s.
        (600.0, 0.0, [True, True, False]),
        # 300, 250 and 230 s.
        (600.0, 400.0, [True, True, True]),
        # A user who expects calmer times is believed for longer.
        (6000.0, 0.0, [True, True, True]),
    ],
)
def test_the_changes_so_far_decide_whether_a_node_that_joins_is_worth_its_copies(
    expected_s: float, apart_s: float, trains: list[bool]
) -> None:
    bench = Bench(SHAPE, job=replace(SHAPE.job, change_interval_s=expected_s))
    bench.prepare()
    found = []
    for step, number in enumerate((3, 4, 5), start=1):
        bench.commit(bench.updates[-1].plan.nodes[0], step, generation=bench.generation)
        found.append(trains_after_a_loss(bench, number))
        bench.beat_until(bench.now_s + apart_s, *bench.updates[-1].plan.nodes)
    assert found == trains
