"""What a start and a loss cost the master does not grow faster than the cluster: bytes and numbers, for times vary."""

from __future__ import annotations

from functools import partial
from math import ceil

import pytest

from tests.calls import calls_of
from tools.bench.scale_control import ControlPlane, measure_loss, measure_manifest

NODES = 256
MOST_ORDER_BYTES, MOST_FENCE_BYTES = 4096, 512


@pytest.fixture(scope="module")
def plane() -> ControlPlane:
    return ControlPlane(NODES)


def test_the_manifest_goes_to_those_who_have_written_layers(plane: ControlPlane) -> None:
    sent = measure_manifest(plane)
    assert 0 < sent.number <= len(plane.update.plan.pipelines[0].nodes)


def test_an_order_after_a_loss_has_at_most_4_kb_and_each_survivor_is_fenced_once(plane: ControlPlane) -> None:
    loss = measure_loss(plane, 1)
    assert loss.generations == 1
    assert loss.fences.number == NODES - 1
    assert loss.fences.largest_bytes <= MOST_FENCE_BYTES
    assert loss.updates.number == NODES - 1
    assert loss.updates.largest_bytes <= MOST_ORDER_BYTES
    assert ceil(loss.updates.bytes / loss.updates.number) <= MOST_ORDER_BYTES


def test_a_rack_that_goes_at_once_is_one_generation() -> None:
    loss = measure_loss(ControlPlane(NODES), 16)
    assert loss.generations == 1
    assert loss.fences.number == NODES - 1, "the first of the rack is gone, and nobody is fenced twice"
    assert loss.updates.largest_bytes <= MOST_ORDER_BYTES


def test_a_start_takes_calls_in_proportion_to_the_nodes() -> None:
    calls = [calls_of(partial(ControlPlane, number)) for number in (128, 512)]
    assert calls[1] < 4 * calls[0], calls
