"""The learning rate of each step: a pure function, so that no worker keeps a scheduler's state.

Schedules have their names and arguments in transformers (`lr_scheduler_type` and `lr_scheduler_kwargs`). One thing
differs: step 1 of a warm-up has a share of the peak, where transformers has 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeGuard

from oobleck.errors import ConfigError
from oobleck.job import OptimizerSpec, Scalar

_MOST = 10**12  # floating-point results of larger arguments overflow

_Shape = Callable[[float, Mapping[str, float]], float]
"""Maps the progress after the warm-up, 0 to 1, and the schedule's arguments to a factor of the peak."""


def rate_factor(spec: OptimizerSpec, *, step: int, max_steps: int) -> float:
    """Return the learning rate of step `step` (1 … max_steps), as a factor of the peak.

    It rises linearly over the first `warmup_steps` steps and reaches 1 at the last of them. The schedule starts at 1
    with the next step, and reaches its end at the step after the last one.

    Raises ConfigError for arguments that the schedule does not have.
    """
    assert step >= 1, f"step {step}; steps count from 1"
    arguments = _arguments(spec)
    if step <= spec.warmup_steps:
        return step / spec.warmup_steps
    if spec.lr_scheduler_type == "inverse_sqrt":
        # It follows steps, not the job's length (Vaswani et al., "Attention Is All You Need", 2017, section 5.3).
        timescale = arguments["timescale"] or spec.warmup_steps or 10_000.0
        return 1.0 / math.sqrt(1.0 + (step - 1 - spec.warmup_steps) / timescale)
    progress = min(1.0, (step - 1 - spec.warmup_steps) / max(1, max_steps - spec.warmup_steps))
    arguments["_peak"] = spec.learning_rate
    arguments["_steps"] = max(1.0, float(max_steps - spec.warmup_steps))
    return _SHAPES[spec.lr_scheduler_type](progress, arguments)


def _arguments(spec: OptimizerSpec) -> dict[str, float]:
    known = _DEFAULTS.get(spec.lr_scheduler_type, {})
    for key, value in spec.lr_scheduler_kwargs.items():
        if key not in known or not _is_number(value):
            takes = f"takes {', '.join(known)}, all of them numbers" if known else "takes none"
            raise ConfigError(f"optimizer.lr_scheduler_kwargs.{key}: {spec.lr_scheduler_type} {takes}")
        if not 0 <= value <= _MOST:
            raise ConfigError(
                f"optimizer.lr_scheduler_kwargs.{key}: {value!r} is not possible; it must be from 0 to {_MOST:,}"
            )
    return {**known, **{key: float(value) for key, value in spec.lr_scheduler_kwargs.items() if _is_number(value)}}


def _is_number(value: Scalar) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cosine(progress: float, arguments: Mapping[str, float]) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * 2.0 * arguments["num_cycles"] * progress))


def _cosine_with_restarts(progress: float, arguments: Mapping[str, float]) -> float:
    if progress >= 1.0:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * (arguments["num_cycles"] * progress % 1.0)))


def _cosine_with_min_lr(progress: float, arguments: Mapping[str, float]) -> float:
    least = arguments["min_lr_rate"] or arguments["min_lr"] / arguments["_peak"]
    return least + (1.0 - least) * _cosine(progress, arguments)


def _polynomial(progress: float, arguments: Mapping[str, float]) -> float:
    end = arguments["lr_end"] / arguments["_peak"]
    return float(end + (1.0 - end) * (1.0 - progress) ** arguments["power"])


def _warmup_stable_decay(progress: float, arguments: Mapping[str, float]) -> float:
    decay = min(1.0, arguments["num_decay_steps"] / arguments["_steps"])
    left = 1.0 if decay == 0.0 else min(1.0, (1.0 - progress) / decay)
    return arguments["min_lr_ratio"] + (1.0 - arguments["min_lr_ratio"]) * 0.5 * (1.0 - math.cos(math.pi * left))


_SHAPES: Mapping[str, _Shape] = {
    "constant": lambda progress, arguments: 1.0,
    "constant_with_warmup": lambda progress, arguments: 1.0,
    "linear": lambda progress, arguments: 1.0 - progress,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "polynomial": _polynomial,
    "warmup_stable_decay": _warmup_stable_decay,
}
_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 1.0},
    "cosine_with_min_lr": {"num_cycles": 0.5, "min_lr": 0.0, "min_lr_rate": 0.0},
    "polynomial": {"lr_end": 1e-7, "power": 1.0},
    "inverse_sqrt": {"timescale": 0.0},
    "warmup_stable_decay": {"num_decay_steps": 0.0, "min_lr_ratio": 0.0},
}
