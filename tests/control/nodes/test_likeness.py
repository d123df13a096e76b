"""What workers must have alike is compared by digest, and a difference names the workers and the thing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.nodes import Alike, EpochLikeness, difference, version_of
from oobleck.control.protocol import EpochEntered
from oobleck.plan import WorkerId
from tests.control.bench import Bench
from tests.control.model import Shape

ONE, OTHER, THIRD = (WorkerId(node=node, device=0) for node in ("n0", "n1", "n2"))
ALIKE = ((Alike.ORDER, "aa"), (Alike.FIRST_SAMPLES, "bb"))


def test_what_is_alike_is_no_difference():
    assert difference(ONE, ALIKE, OTHER, tuple(reversed(ALIKE))) is None


def test_what_only_one_of_them_tells_is_no_difference():
    """One has imported a library that the other does without."""
    assert difference(ONE, (*ALIKE, (version_of("peft"), "1.0")), OTHER, ALIKE) is None


@pytest.mark.parametrize(
    "thing", [Alike.WEIGHTS, Alike.LOSS, Alike.ORDER, Alike.FIRST_SAMPLES, version_of("transformers")]
)
def test_a_difference_names_the_workers_the_thing_and_what_to_change(thing: str):
    text = difference(OTHER, ((Alike.STRUCTURE, "s"), (thing, "x")), ONE, ((Alike.STRUCTURE, "s"), (thing, "y")))
    assert text is not None
    said, advice = text.split("; ", 1)
    assert said == f"n1:0 and n0:0 differ in {thing} (x and y)"
    assert advice


def entered(epoch: int, order: str) -> EpochEntered:
    return EpochEntered(device=0, epoch=epoch, alike=((Alike.ORDER, order),))


def test_workers_are_compared_in_the_epoch_that_they_enter_whoever_is_ahead():
    likeness = EpochLikeness()
    assert likeness.entered(ONE, entered(1, "a")) is None
    assert likeness.entered(ONE, entered(2, "b")) is None
    assert likeness.entered(OTHER, entered(1, "a")) is None
    assert likeness.entered(OTHER, entered(2, "b")) is None
    text = likeness.entered(THIRD, entered(2, "a"))
    assert text is not None
    assert text.startswith("epoch 2: n2:0 and n0:0 differ in the order of samples (a and b)")


def test_what_is_kept_of_epochs_is_bounded():
    likeness = EpochLikeness()
    for epoch in range(100):
        likeness.entered(ONE, entered(epoch, "a"))
    assert likeness.entered(OTHER, entered(99, "b")) is not None
    assert likeness.entered(OTHER, entered(3, "b")) is None, "long over"


def test_a_run_whose_workers_take_other_samples_ends_and_names_them():
    shape = Shape(num_nodes=3, num_pipelines=3)
    bench = Bench(shape, job=replace(shape.job, max_steps=9))
    bench.prepare()
    bench.say("n0", entered(1, "a"))
    bench.say("n1", entered(1, "a"))
    assert bench.ended is None
    bench.say("n2", entered(1, "c"))
    assert bench.ended is not None
    assert bench.ended.exit_code == 78
    assert bench.ended.reason.startswith("epoch 1: n2:0 and n0:0 differ in the order of samples (c and a); ")
