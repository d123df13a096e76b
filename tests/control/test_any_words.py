"""Whatever anybody says, and whenever: the coordinator raises nothing, and goes on to its next deadline."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.protocol import AgentMessage, PeerFailed, StepCommitted
from tests.control.bench import Bench, ready
from tests.control.model import Shape
from tests.control.steps.test_judgement import record
from tests.examples import examples
from tests.wire.strategies import built

SHAPE = Shape(num_nodes=3, num_layers=4, layers_per_device=4, max_steps=100)
NODES = ("n0", "n1", "n2")
SMALL = {
    "device": st.integers(0, 1),
    "generation": st.integers(0, 3),
    "step": st.integers(0, 4),
    "pid": st.integers(7, 9),
}


def nobody_reached() -> Bench:
    return Bench(SHAPE)


def nobody_ready() -> Bench:
    bench = Bench(SHAPE)
    for node in NODES:
        bench.up(node)
    return bench


def some_ready() -> Bench:
    bench = nobody_ready()
    bench.say("n0", ready())
    return bench


def in_training() -> Bench:
    bench = Bench(SHAPE)
    bench.prepare()
    return bench


def in_recovery() -> Bench:
    bench = in_training()
    bench.fail("n2")
    return bench


def recovered() -> Bench:
    bench = in_recovery()
    for node in ("n0", "n1"):
        bench.answer(node, adopted=1, layers=(0, 1, 2, 3))
    bench.wait(0.01)
    return bench


MOMENTS = (nobody_reached, nobody_ready, some_ready, in_training, in_recovery, recovered)


@st.composite
def words(draw: st.DrawFn) -> AgentMessage:
    """Any message, with numbers that are often those of the run."""
    kind = draw(st.sampled_from(get_args(AgentMessage)))
    names = {part.name for part in fields(kind)}
    chosen = {name: values for name, values in SMALL.items() if name in names and draw(st.integers(0, 3))}
    message: AgentMessage = draw(built(kind, **chosen))
    return message


@examples(150)
@given(
    moment=st.sampled_from(MOMENTS),
    said=st.lists(st.tuples(st.sampled_from(NODES), words(), st.sampled_from((0.0, 0.01, 0.3, 4.0))), max_size=8),
)
def test_no_words_of_anybody_raise_anything(moment: Callable[[], Bench], said: list[tuple[str, AgentMessage, float]]):
    bench = moment()
    for node, message, wait_s in said:
        bench.say(node, message)
        bench.wait(wait_s)
    for _ in range(20):
        due_s = bench.coordinator.next_deadline()
        if math.isinf(due_s):
            break
        assert not math.isnan(due_s)
        bench.wait(max(0.0, due_s - bench.now_s))


@pytest.mark.parametrize("moment", [nobody_reached, nobody_ready, some_ready])
def test_words_of_a_run_before_mean_nothing_to_one_that_starts(moment: Callable[[], Bench]):
    bench = moment()
    bench.say("n0", StepCommitted(device=0, record=replace(record(7), generation=5)))
    bench.say("n0", PeerFailed(device=0, generation=0, detail="of before"))
    bench.wait(1.0)
    assert bench.ended is None
