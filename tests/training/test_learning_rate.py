from __future__ import annotations

import math

import pytest

from oobleck.job import OptimizerSpec
from oobleck.training.learning_rate import learning_rate


def _rates(kind: str, *, warmup_steps: int = 10, max_steps: int = 100) -> list[float]:
    spec = OptimizerSpec(learning_rate=2.0, lr_scheduler_type=kind, warmup_steps=warmup_steps)  # type: ignore[arg-type]
    return [learning_rate(spec, step=step, max_steps=max_steps) for step in range(1, max_steps + 1)]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_the_warmup_rises_in_equal_steps_to_the_peak(kind: str):
    assert _rates(kind)[:10] == pytest.approx([0.2 * step for step in range(1, 11)])


def test_constant_stays_at_the_peak():
    assert set(_rates("constant")[9:]) == {2.0}


def test_linear_falls_in_equal_steps_and_would_reach_zero_after_the_last():
    after = _rates("linear")[10:]
    assert after == pytest.approx([2.0 * (90 - i) / 90 for i in range(90)])


def test_cosine_is_half_way_in_the_middle():
    after = _rates("cosine")[10:]
    assert after[0] == 2.0
    assert after[45] == pytest.approx(1.0)
    assert after[-1] == pytest.approx(1.0 + math.cos(math.pi * 89 / 90))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_no_step_has_a_rate_of_zero(kind: str):
    for warmup_steps in (0, 1, 5, 99, 100, 500):
        assert all(0 < rate <= 2.0 for rate in _rates(kind, warmup_steps=warmup_steps))
