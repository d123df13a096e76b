"""Modules that take the place of those that a stage does not hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .adapters import original_of


class Passthrough(nn.Module):
    """Stands in for a module that is elsewhere: gives back its first argument.

    A model may look at attributes of its blocks (which kind of attention, for instance), so those that this
    module lacks are looked up in the module that it stands in for.
    """

    def __init__(self, original: nn.Module, *, returns_tuple: bool = False, width: int | None = None) -> None:
        """With a `width`, it gives zeros of that many features instead."""
        super().__init__()
        self.__dict__["original"] = original  # Not registered: its parameters are not this module's.
        self.__dict__["returns_tuple"] = returns_tuple
        self.__dict__["width"] = width

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()))
        if (width := self.__dict__["width"]) is not None:
            hidden = hidden.new_zeros((*hidden.shape[:-1], width))  # some models add to it in place
        return (hidden,) if self.__dict__["returns_tuple"] else hidden


class ZeroEmbedding(nn.Module):
    """Stands in for an embedding that is elsewhere: zeros, which take no memory and reach no block."""

    def __init__(self, original: nn.Embedding, *, device: torch.device) -> None:
        super().__init__()
        self.embedding_dim = original.embedding_dim
        self.dtype = original.weight.dtype
        self.device = device

    def forward(self, ids: torch.Tensor | tuple[int, ...], *_args: Any, **_kwargs: Any) -> torch.Tensor:
        shape = ids.shape if isinstance(ids, torch.Tensor) else ids  # of positions, some models give the shape alone
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(*shape, self.embedding_dim)


def stand_in_before_blocks(module: nn.Module, *, width: int | None, device: torch.device) -> nn.Module:
    """Return what stands in for a module that runs before the blocks, on stages that do not hold it.

    `width` is how many features it gives, where these are not as many as it takes.
    """
    embedding = original_of(module)
    if isinstance(embedding, nn.Embedding):
        return ZeroEmbedding(embedding, device=device)
    return Passthrough(module, width=width)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the one called `name`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
