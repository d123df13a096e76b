"""Modules that take the place of those that a stage does not hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["Passthrough", "ZeroEmbedding", "replace_module"]


class Passthrough(nn.Module):
    """Stands in for a module that is elsewhere: gives back its first argument.

    A model may look at attributes of its blocks (which kind of attention, for instance), so those that this
    module lacks are looked up in the module that it stands in for.
    """

    def __init__(self, original: nn.Module, *, returns_tuple: bool = False) -> None:
        super().__init__()
        self.__dict__["original"] = original  # Not registered: its parameters are not this module's.
        self.__dict__["returns_tuple"] = returns_tuple

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()))
        return (hidden,) if self.__dict__["returns_tuple"] else hidden


class ZeroEmbedding(nn.Module):
    """Stands in for an embedding that is elsewhere: zeros, which take no memory and reach no block."""

    def __init__(self, original: nn.Embedding) -> None:
        super().__init__()
        self.embedding_dim = original.embedding_dim
        self.dtype = original.weight.dtype

    def forward(self, ids: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        zero = torch.zeros((), dtype=self.dtype, device=ids.device)
        return zero.expand(*ids.shape, self.embedding_dim)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the one called `name`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
