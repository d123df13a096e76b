from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from oobleck.errors import ConfigError
from oobleck.job import OptimizerSpec
from oobleck.training.optim import rate_factor


def _rates(kind: str, *, warmup_steps: int = 10, max_steps: int = 100, **arguments: float) -> list[float]:
    spec = OptimizerSpec(
        learning_rate=2.0,
        lr_scheduler_type=kind,  # type: ignore[arg-type]
        lr_scheduler_kwargs=arguments,
        warmup_steps=warmup_steps,
    )
    return [spec.learning_rate * rate_factor(spec, step=step, max_steps=max_steps) for step in range(1, max_steps + 1)]


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


_SAME_AS_TRANSFORMERS = {
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {"num_cycles": 1.5},
    "cosine_with_restarts": {"num_cycles": 3.0},
    "cosine_with_min_lr": {"min_lr": 0.5},
    "polynomial": {"lr_end": 0.25, "power": 2.0},
    "inverse_sqrt": {"timescale": 7.0},
    "warmup_stable_decay": {"num_decay_steps": 20.0, "min_lr_ratio": 0.1},
}


@pytest.mark.parametrize("kind", _SAME_AS_TRANSFORMERS)
def test_schedules_are_those_of_transformers_after_the_warmup(kind: str):
    arguments = _SAME_AS_TRANSFORMERS[kind]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = get_scheduler(kind, optimizer, 10, 100, scheduler_specific_kwargs=dict(arguments))
    theirs = []
    for _ in range(100):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert _rates(kind, **arguments)[10:] == pytest.approx(theirs[10:], rel=1e-9)


def test_arguments_that_a_schedule_does_not_have_are_named():
    with pytest.raises(ConfigError, match=r"lr_scheduler_kwargs\.power: .*num_cycles"):
        _rates("cosine", power=1.0)
    with pytest.raises(ConfigError, match=r"lr_scheduler_kwargs\.power: linear"):
        _rates("linear", power=1.0)
