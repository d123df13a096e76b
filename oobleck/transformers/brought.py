"""The optimizer and the schedule that a script gives to its trainer, or makes in a subclass, for workers to make."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from oobleck.errors import ConfigError

from .checks import overrider_of

_PLACE = "Trainer(optimizers=…)"
_CREATORS = ("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler")
_TRIED_STEPS = 1000
_OF_GROUP = ("params", "weight_decay", "initial_lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class BroughtOptimizer:
    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    weight_decay: float
    decayed: frozenset[int]
    """The ids of the decayed parameters."""

    @property
    def make(self) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
        return partial(self.kind, **self.options)


def let_create(trainer: Any, *, max_steps: int) -> None:
    """Have a subclass that overrides the methods for it make its optimizer and its schedule."""
    if trainer.optimizer is None and any(overrider_of(trainer, name) for name in _CREATORS):
        trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)


def brought_optimizer(trainer: Any) -> BroughtOptimizer | None:
    """Return what a script's optimizer is; None if it has none. Raises ConfigError where workers could make no such."""
    optimizer = trainer.optimizer
    if optimizer is None:
        return None
    kind, groups = type(optimizer), optimizer.param_groups
    if not isinstance(optimizer, torch.optim.Optimizer) or optimizer.state:
        raise ConfigError(f"{_PLACE}: {kind.__name__} must be a new one of torch's: it has a state already")
    trained = {id(each): name for name, each in trainer.model.named_parameters() if each.requires_grad}
    held = {id(each) for group in groups for each in group["params"]}
    if absent := sorted(name for key, name in trained.items() if key not in held):
        raise ConfigError(
            f"{_PLACE}: {kind.__name__} has not {absent[0]}, which would stay as it is; freeze it "
            "(requires_grad_(False))"
        )
    if len(held - trained.keys()) > len([each for each in _frozen(trainer) if id(each) in held]):
        raise ConfigError(f"{_PLACE}: {kind.__name__} has parameters that are not the model's")
    options = [{name: value for name, value in group.items() if name not in _OF_GROUP} for group in groups]
    for group, own in zip(groups, options, strict=True):
        own["lr"] = group.get("initial_lr", group["lr"])  # a schedule has set `lr` since
        if differing := sorted(name for name in own if own[name] != options[0].get(name)):
            raise ConfigError(
                f"{_PLACE}: the groups of {kind.__name__} differ in {differing[0]}; workers make two, with weight "
                "decay and without"
            )
    decays = {group.get("weight_decay", 0.0) for group in groups if group["params"]} - {0.0}
    if len(decays) > 1:
        raise ConfigError(
            f"{_PLACE}: {kind.__name__} has the weight decays {sorted(decays)}; one, and none, can be given"
        )
    known = inspect.signature(kind).parameters
    brought = BroughtOptimizer(
        kind=kind,
        options={name: value for name, value in options[0].items() if name in known},
        weight_decay=next(iter(decays), 0.0),
        decayed=frozenset(id(each) for group in groups if group.get("weight_decay", 0.0) for each in group["params"]),
    )
    try:
        _ = 0.0 * brought.make([{"params": [torch.nn.Parameter(torch.zeros(1))]}]).param_groups[0]["lr"]
    # It may be the script's own class.
    except Exception as error:
        raise ConfigError(
            f"{_PLACE}: workers cannot make {kind.__name__} by the options of its groups ({error}); give one with a "
            "rate, which its schedule sets"
        ) from error
    return brought


def brought_schedule(trainer: Any, *, max_steps: int) -> Callable[[int], float] | None:
    """Return a script's factor of the rate at each step, from 1. Raises ConfigError for one that is no such factor."""
    scheduler = trainer.lr_scheduler
    if scheduler is None:
        return None
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) and len(set(scheduler.lr_lambdas)) == 1:
        factor = scheduler.lr_lambdas[0]
        return lambda step: float(factor(step - 1))
    name, wanted = type(scheduler).__name__, "give one that follows steps alone, or leave it out"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its optimizer takes no steps
            factors = _factors(scheduler, max_steps=max_steps)
            again = _factors(scheduler, max_steps=min(max_steps, _TRIED_STEPS))
    except ConfigError:
        raise
    # It may be the script's own class.
    except Exception as error:
        raise ConfigError(f"{_PLACE}: {name} cannot run ahead of training ({error}); {wanted}") from error
    if factors[: len(again)] != again:
        raise ConfigError(f"{_PLACE}: {name} has other rates when it runs again; {wanted}")
    return lambda step: factors[min(step, max_steps) - 1]


class _Groups(torch.optim.Optimizer):
    """The groups of an optimizer, with their options, and nothing to train."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        nothing = [{**group, "params": [torch.nn.Parameter(torch.zeros(0))]} for group in optimizer.param_groups]
        super().__init__(nothing, dict(optimizer.defaults))


def _factors(scheduler: Any, *, max_steps: int) -> list[float]:
    """Return the factor of each step, by a copy of the schedule that runs ahead. Raises ConfigError."""
    name, groups = f"{_PLACE}: {type(scheduler).__name__}", _Groups(scheduler.optimizer)
    ahead = copy.deepcopy(scheduler, {id(scheduler.optimizer): groups})
    others = [_others(group) for group in groups.param_groups]
    factors: list[float] = []
    for step in range(1, max_steps + 1):
        now = {group["lr"] / group["initial_lr"] if group["initial_lr"] else 0.0 for group in groups.param_groups}
        if len(now) > 1 or any(group["lr"] and not group["initial_lr"] for group in groups.param_groups):
            raise ConfigError(f"{name} gives groups rates of their own at step {step}; give all one factor")
        for before, group in zip(others, groups.param_groups, strict=True):
            if changed := [key for key, value in _others(group).items() if before[key] != value]:
                raise ConfigError(
                    f"{name} changes {changed[0]} at step {step}, and workers follow rates alone; leave it as it is"
                )
        factors += map(float, now)
        ahead.step()
    return factors


def _others(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options but its rate."""
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


def _frozen(trainer: Any) -> list[torch.nn.Parameter]:
    return [each for each in trainer.model.parameters() if not each.requires_grad]
