"""Refuses what a script reads of a model in training: its weights and the optimizer are in the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Never

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_VALUELESS = frozenset(
    (
        *("__hash__", "__len__", "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "device", "dim"),
        *("dtype", "element_size", "get_device", "grad", "grad_fn", "has_names", "is_complex", "is_contiguous"),
        *("is_cpu", "is_cuda", "is_floating_point", "is_leaf", "is_meta", "is_mps", "is_nested", "is_pinned"),
        *("is_quantized", "is_shared", "is_sparse", "is_xla", "itemsize", "layout", "name", "names", "nbytes", "ndim"),
        *("ndimension", "nelement", "numel", "output_nr", "register_hook", "requires_grad", "requires_grad_"),
        *("retains_grad", "shape", "size", "storage_offset", "stride"),
    )
)
"""Functions and attributes that reveal nothing of a tensor's values."""


class OnNodes:
    """Stands for what only workers have: each use of it is refused."""

    def __init__(self, what: str, refuse: Callable[[str], Never]) -> None:
        """`refuse` raises the error."""
        self._what = what
        self._refuse = refuse

    def __getattr__(self, name: str) -> Never:
        self._refuse(self._what)


class WeightsElsewhere(TorchFunctionMode):
    """Makes each use of the values of a model's trained parameters an error within the block."""

    def __init__(self, model: nn.Module, refusal: Callable[[str], Exception | None]) -> None:
        """`refusal` makes the error from a parameter's name, or returns None if its value is right at the moment."""
        super().__init__()
        self._model = model
        self._refusal = refusal
        self._names: dict[int, str] = {}
        self.look_again()

    def look_again(self) -> None:
        """Look the parameters up again, since a model may have been moved to another device."""
        trained = [(name, each) for name, each in self._model.named_parameters() if each.requires_grad]
        # Keyed by memory, as views and `data` are other tensors with the same values.
        self._names = {each.untyped_storage().data_ptr(): name for name, each in trained}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # torch passes an attribute's access as the `__get__` of its descriptor, which has the attribute's name.
        named = func.__self__ if func.__name__ == "__get__" else func
        if named.__name__ not in _VALUELESS:
            for name in self._found([*args, *(kwargs or {}).values()]):
                if (error := self._refusal(name)) is not None:
                    raise error
        return func(*args, **(kwargs or {}))

    def _found(self, values: Iterable[Any]) -> Iterator[str]:
        for value in values:
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                name = self._names.get(value.untyped_storage().data_ptr())
                if name is not None:
                    yield name
            elif isinstance(value, list | tuple):
                yield from self._found(value)
