"""Initial values of parameters and buffers, drawn by the model's own rules, whatever the cut.

Each module is initialized by itself, from a generator seeded with (seed, the module's name). So a layer gets the same
bits alone, in any stage, and in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from oobleck.training.randomness import derive_seed, drawing_from

from .adapters import initialize_adapter, is_adapted, plain_name
from .layered_model import SplittableModel
from .splitting import cannot_split


def unset(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor that must still be set: it is not-a-number, so that its use is noticed."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)
    if dtype == torch.bool:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype, device=device)


def initialize_module(model: SplittableModel, module: nn.Module, name: str, *, seed: int) -> None:
    """Set the parameters within the module that `model` calls `name` to their initial values.

    `module` need not be in its place. Equal seeds give equal bits on every device. Parameters on the meta device are
    skipped.
    """
    # Like transformers, children come before their parents, whose rules take precedence.
    for child_name, child in module.named_children():
        initialize_module(model, child, f"{name}.{child_name}", seed=seed)
    # The plain name, so that adapters do not change the values of other parameters.
    with drawing_from(derive_seed(seed, "initial value", plain_name(name))), torch.no_grad(), _on_cpu(module):
        _rules_of(model, name)._init_weights(module)
    _initialize_adapter(model, module, name, seed=seed)


def initialize_adapters(model: SplittableModel, module: nn.Module, name: str, *, seed: int) -> None:
    """Set only the adapters within the module that `model` calls `name` to their initial values."""
    for path, inner in module.named_modules(prefix=name):
        _initialize_adapter(model, inner, path, seed=seed)


def _initialize_adapter(model: SplittableModel, module: nn.Module, name: str, *, seed: int) -> None:
    if is_adapted(module):
        with drawing_from(derive_seed(seed, "adapter", name)), torch.no_grad(), _on_cpu(module):
            initialize_adapter(model, module)


def materialize_buffers(model: SplittableModel, *, device: torch.device) -> None:
    """Give all buffers of a model built on the meta device memory on `device`, and their values.

    Raises ConfigError if the model's rules leave a buffer without a value.
    """
    # Checkpoints have only persistent buffers. The values of others (rotary tables, scales) exist nowhere but in the
    # model's rules for initialization.
    for name, module in list(model.named_modules()):
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        for attribute, buffer in buffers.items():
            module._buffers[attribute] = unset(buffer.shape, dtype=buffer.dtype, device=torch.device("cpu"))
        with torch.no_grad():
            _rules_of(model, name)._init_weights(module)
        for attribute in buffers:
            value = module._buffers[attribute]
            assert value is not None
            if _is_unset(value):
                raise cannot_split(
                    model, f"its rules for initialization leave the buffer {name}.{attribute} without a value"
                )
            module._buffers[attribute] = value.to(device)


def move_buffers(model: SplittableModel, *, device: torch.device) -> None:
    for module in model.modules():
        for attribute, buffer in module.named_buffers(recurse=False):
            module._buffers[attribute] = buffer.to(device)


def _is_unset(value: torch.Tensor) -> bool:
    if value.dtype.is_floating_point:
        return bool(value.isnan().any())
    return value.dtype != torch.bool and bool((value == torch.iinfo(value.dtype).min).any())


def _rules_of(model: SplittableModel, name: str) -> SplittableModel:
    """Return the innermost transformers model around a module, whose rules apply to it."""
    rules, module = model, model  # type: SplittableModel, nn.Module
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        if isinstance(module, PreTrainedModel):
            rules = module
    return rules


@contextmanager
def _on_cpu(module: nn.Module) -> Iterator[None]:
    """Within the block, a module's parameters are on the CPU; its end copies them back to their devices."""
    # Each kind of device draws other numbers from a seed, so the CPU draws for all.
    moved = [parameter for parameter in module.parameters() if parameter.device.type not in ("cpu", "meta")]
    homes = [parameter.data for parameter in moved]
    for parameter in moved:
        parameter.data = parameter.data.cpu()
    try:
        yield
    finally:
        for parameter, home in zip(moved, homes, strict=True):
            parameter.data = home.copy_(parameter.data)
