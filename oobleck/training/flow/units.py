"""The units of a model, its blocks among them, and the layers that they make up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError, UncutModel
from oobleck.training.randomness import drawing_alike

_LEAST_SHARE = 4
"""A layer has at least this part of the blocks' mean of parameters, so that no layer is too small to place."""


def uncut_model(model: nn.Module, why: str) -> UncutModel:
    return UncutModel(f"model: {type(model).__name__} cannot be split into layers: {why}", reason=why)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of one module, without its children's, that are saved with the model."""
    for attribute, buffer in module._buffers.items():
        if buffer is not None and attribute not in module._non_persistent_buffers_set:
            yield attribute, buffer


def calls_of_modules(model: nn.Module, compute_loss: Callable[[], torch.Tensor]) -> Counter[str]:
    counts: Counter[str] = Counter()

    def noting(name: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            counts[name] += 1

        return note

    handles = [module.register_forward_pre_hook(noting(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), drawing_alike(0):
            compute_loss()
    finally:
        for handle in handles:
            handle.remove()
    return counts


def units_of(model: nn.Module, counts: Counter[str]) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the units, keyed by name, and the names of those that are blocks."""
    names = {id(module): name for name, module in reversed([*model.named_modules()])}
    blocks: list[str] = []

    def find_blocks(name: str, module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList | nn.Sequential):
            # What calls its members in turn is a list, unless these are parts of different kinds.
            called = list(dict.fromkeys(names[id(member)] for member in module if counts[names[id(member)]]))
            is_list = isinstance(module, nn.ModuleList) or len({type(member) for member in module}) == 1
            num_calls = sum(counts[name] for name in called)
            if is_list and num_calls > 1 and _has_state(module):
                blocks.extend(member for member in called if member not in blocks)
                return
        for child, inner in module.named_children():
            find_blocks(f"{name}.{child}" if name else child, inner)

    find_blocks("", model)
    units: dict[str, nn.Module] = {}
    holders = {prefix for root in blocks for prefix in _prefixes(root)}

    def find_units(name: str, module: nn.Module) -> None:
        if names[id(module)] != name:
            return  # another name of a unit
        is_inner = name == "" or name in holders or (not counts[name] and name not in blocks)
        if not is_inner:
            if _has_state(module):
                units[name] = module
            return
        for child, inner in module.named_children():
            find_units(f"{name}.{child}" if name else child, inner)

    find_units("", model)
    return units, [name for name in blocks if name in units]


def _prefixes(root: str) -> Iterator[str]:
    parts = root.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count])


def _has_state(module: nn.Module) -> bool:
    held = (each for inner in module.modules() for each in (*inner._parameters.values(), *_kept(inner)))
    return any(each is not None for each in held)


def _kept(module: nn.Module) -> Iterator[torch.Tensor]:
    return (tensor for _, tensor in persistent_buffers(module))


def layer_starts(model: nn.Module, modules: list[str], blocks: list[str]) -> list[int]:
    """Begin a layer at each call of a block, unless the one before would be small; what ends the model is the last."""
    sizes = {name: sum(each.numel() for each in model.get_submodule(name).parameters()) for name in set(modules)}
    of_blocks = [sizes[name] for name in modules if name in blocks]
    least = sum(of_blocks) / max(1, len(of_blocks)) / _LEAST_SHARE
    starts, size, is_first = [0], 0, True
    last_block = max((at for at, name in enumerate(modules) if name in blocks), default=0)
    for at, name in enumerate(modules):
        begins = (name in blocks and (size >= least or is_first)) or at == last_block + 1
        if at and begins:
            starts.append(at)
            size = 0
        size += sizes[name]
        is_first = is_first and name not in blocks
    return starts


@contextmanager
def trial_of(model: nn.Module) -> Iterator[None]:
    """Within the block, the model is as on a stage: it trains, and keeps no caches."""
    was_training = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        stack.enter_context(without_caches(model))
        model.train()
        try:
            yield
        finally:
            for module, mode in was_training.items():
                module.training = mode


@contextmanager
def constant_parameters(model: nn.Module) -> Iterator[None]:
    """Raise ConfigError that names a parameter which forward passes in the block change, whatever else they raise."""
    before = [(name, parameter, parameter._version) for name, parameter in model.named_parameters()]
    try:
        yield
    finally:
        for name, parameter, version in before:
            if parameter._version != version:  # torch counts changes in place
                raise ConfigError(
                    f"model: in {type(model).__name__}, a forward pass changes the parameter {name} in place: nodes "
                    "hold and save what their optimizers make of it; leave the change out"
                )


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Within the block, the model's configurations ask for no caches, through which blocks would reach each other."""
    before = [(config, config.use_cache) for config in _configs(model) if getattr(config, "use_cache", False)]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, value in before:
            config.use_cache = value


def _configs(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    left = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    while left:
        config = left.pop()
        if id(config) not in found and hasattr(config, "to_dict"):
            found[id(config)] = config
            left += [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return list(found.values())
