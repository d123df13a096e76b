"""The optimizer and the schedule that a script gives to its trainer, or makes in a subclass, for workers to make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from oobleck.errors import ConfigError

from .checks import overrider_of

_PLACE = "Trainer(optimizers=…)"
_CREATORS = ("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler")
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
    return BroughtOptimizer(
        kind=kind,
        options={name: value for name, value in options[0].items() if name in known},
        weight_decay=next(iter(decays), 0.0),
        decayed=frozenset(id(each) for group in groups if group.get("weight_decay", 0.0) for each in group["params"]),
    )


def brought_schedule(trainer: Any) -> Callable[[int], float] | None:
    """Return a script's factor of the rate at each step, from 1. Raises ConfigError for one that is no such factor."""
    scheduler = trainer.lr_scheduler
    if scheduler is None:
        return None
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) or len(set(scheduler.lr_lambdas)) > 1:
        raise ConfigError(
            f"{_PLACE}: {type(scheduler).__name__} is not one function of the step alone; give a LambdaLR, or leave it "
            "out and set lr_scheduler_type"
        )
    factor = scheduler.lr_lambdas[0]
    return lambda step: float(factor(step - 1))


def _frozen(trainer: Any) -> list[torch.nn.Parameter]:
    return [each for each in trainer.model.parameters() if not each.requires_grad]
