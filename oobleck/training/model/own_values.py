"""Whether a job()'s model has values of its own, other than those of its rules for initialization.

Such a model is made without memory, and gets its values on the nodes: a transformers model from its `_init_weights`,
layers from their `reset_parameters`. These rules would silently replace any value that comes from elsewhere, because
the script loads or fills it. So every operation of the model() function counts as a possible origin of a tensor's last
value; a model with an origin other than its rules is taken apart as a live one.
"""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from .adapters import is_adapter
from .brought import full_name

_RULES_OF_LAYERS = ("reset_parameters", "_reset_parameters")
_RULES_OF_ADAPTERS = "reset_lora_parameters"
_COPIES = ("aten::clone", "aten::_to_copy")


def own_value_of(make: Callable[[], nn.Module]) -> str | None:
    """Return the name of a parameter or buffer whose value `make` sets, other than by the model's rules.

    `make` builds the model on the meta device. Returns None where there is none; raises what `make` raises.
    """
    origins = _Origins()
    with warnings.catch_warnings(), _noting_rules_of_models(origins), origins:
        warnings.simplefilter("ignore")  # such as those about values lost on the meta device
        model = make()
    of_models = {id(inner) for each in model.modules() if isinstance(each, PreTrainedModel) for inner in each.modules()}
    for path, module in model.named_modules():
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = full_name(path, attribute)
            allowed = {_Origin.NOWHERE, _Origin.MODEL if id(module) in of_models else _Origin.LAYER}
            if is_adapter(name):
                allowed = {_Origin.LAYER, _Origin.ADAPTER}
            if tensor is not None and origins.of(tensor) not in allowed:
                return name
    return None


class _Origin(enum.Enum):
    """The code that a tensor's values come from."""

    NOWHERE = enum.auto()
    """Uninitialized memory."""
    LAYER = enum.auto()
    MODEL = enum.auto()
    ADAPTER = enum.auto()
    SCRIPT = enum.auto()


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Records the origin of the values in each tensor's memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: dict[int, tuple[_Origin, torch.UntypedStorage]] = {}
        """Keyed by the storage's address, which no other storage takes while this one is kept here."""

    def of(self, tensor: torch.Tensor) -> _Origin:
        """Return a tensor's origin: the script if it is older than the mode."""
        known = self._memory.get(tensor.untyped_storage()._cdata)
        return _Origin.SCRIPT if known is None else known[0]

    def note(self, tensors: Iterable[object], origin: _Origin) -> None:
        """Record the origin of the values of these tensors; other objects are ignored."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                self._memory[storage._cdata] = (origin, storage)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        schema = func._schema
        written = [
            args[index] if index < len(args) else keywords.get(argument.name)
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        # Tensors over the same storage have one origin, so a write through a view counts for all of them.
        if written:
            self.note(_flat(written), _origin_of_now())
        elif new := [each for each in _flat([result]) if self._is_new(each)]:
            self.note(new, self._origin_of_new(schema.name, args))
        return result

    def _is_new(self, value: object) -> bool:
        is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        return is_dense and value.untyped_storage()._cdata not in self._memory  # type: ignore[attr-defined]  # a tensor

    def _origin_of_new(self, operation: str, args: tuple[Any, ...]) -> _Origin:
        # `aten::empty`, `empty_like`, `empty_strided` and the like set no values.
        if "empty" in operation:
            return _Origin.NOWHERE
        return self.of(args[0]) if operation in _COPIES else _origin_of_now()


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _origin_of_now() -> _Origin:
    """Find whether the code that runs now was called by a rule."""
    # Nodes call a layer's rule without arguments: a method of that name with further arguments is the script's own.
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not own_value_of.__code__:
        code = frame.f_code
        if code.co_name in _RULES_OF_LAYERS and code.co_argcount + code.co_kwonlyargcount == 1:
            return _Origin.LAYER
        if code.co_name == _RULES_OF_ADAPTERS:
            return _Origin.ADAPTER
        frame = frame.f_back  # type: ignore[assignment]  # it is compared with None above
    return _Origin.SCRIPT


@contextmanager
def _noting_rules_of_models(origins: _Origins) -> Iterator[None]:
    """Within the block, record which models transformers applies their rules to."""
    # Transformers calls this at the end of each model's constructor, and skips the operations on the meta device.
    apply = PreTrainedModel.init_weights

    def init_weights(model: PreTrainedModel) -> None:
        apply(model)  # type: ignore[no-untyped-call]
        origins.note((*model.parameters(), *model.buffers()), _Origin.MODEL)

    PreTrainedModel.init_weights = init_weights  # type: ignore[method-assign]  # until the end of the block
    try:
        yield
    finally:
        PreTrainedModel.init_weights = apply  # type: ignore[method-assign]
