"""Stand-ins for the modules that a stage does not hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .adapters import original_of


class Passthrough(nn.Module):
    """Stands in for a module held elsewhere: returns its first argument, or zeros of `width` features."""

    def __init__(self, original: nn.Module, *, returns_tuple: bool = False, width: int | None = None) -> None:
        super().__init__()
        self.__dict__["original"] = original  # Not registered: its parameters are not this module's.
        self.__dict__["returns_tuple"] = returns_tuple
        self.__dict__["width"] = width

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # A model may read attributes of its blocks, such as the kind of attention.
            return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()))
        if (width := self.__dict__["width"]) is not None:
            # Unlike `ZeroEmbedding`'s, these zeros have memory of their own: some models add to them in place.
            hidden = hidden.new_zeros((*hidden.shape[:-1], width))
        return (hidden,) if self.__dict__["returns_tuple"] else hidden


class ZeroEmbedding(nn.Module):
    """Stands in for an embedding held elsewhere: returns zeros, which take no memory and reach no block."""

    def __init__(self, original: nn.Embedding, *, device: torch.device) -> None:
        super().__init__()
        self.embedding_dim = original.embedding_dim
        self.dtype = original.weight.dtype
        self.device = device

    def forward(self, ids: torch.Tensor | tuple[int, ...], *_args: Any, **_kwargs: Any) -> torch.Tensor:
        shape = ids.shape if isinstance(ids, torch.Tensor) else ids  # some models pass only the shape of positions
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(*shape, self.embedding_dim)


def stand_in_before_blocks(module: nn.Module, *, width: int | None, device: torch.device) -> nn.Module:
    """Return the stand-in for a module that runs before the blocks.

    `width` is its number of output features, if it differs from that of its input.
    """
    embedding = original_of(module)
    if isinstance(embedding, nn.Embedding):
        return ZeroEmbedding(embedding, device=device)
    return Passthrough(module, width=width)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
