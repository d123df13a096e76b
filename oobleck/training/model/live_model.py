"""A model that a script has made, with weights that training is to start from: taken apart.

It is a transformers model, or a list of layers.

What is left of the model is a skeleton without memory, of which stages are copies. Its weights go into a file in the
node's cache, named for what they are, and each worker reads its own layers from there: no worker keeps the whole
model, and those of a machine share the file.

A job()'s model is made without values, and gets those of its rules for initialization on the nodes: a transformers
model by its `_init_weights`, layers by their `reset_parameters`. A value that comes from elsewhere, as it is loaded or
filled in, would be replaced by another, and no error would say so. So every operation of a model() that is run without
values is looked at for whether it gives a tensor its last value; such a model is a live one as well.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from oobleck.errors import ConfigError, ResourceLost

from .adapters import is_adapter, unwrapped
from .brought import GradientHook, gradient_hooks, named_state, require_trainable
from .configuration import task_of_built
from .layered_model import LayeredModel
from .splitting import require_one_stack

_RULES_OF_LAYERS = ("reset_parameters", "_reset_parameters")
_RULES_OF_ADAPTERS = "reset_lora_parameters"
_COPIES = ("aten::clone", "aten::_to_copy")

LiveKind = PreTrainedModel | LayeredModel


class LiveModel:
    """A model's skeleton, and its weights."""

    def __init__(
        self, skeleton: LiveKind, weights: LiveWeights | None, hooks: Mapping[str, tuple[GradientHook, ...]]
    ) -> None:
        self._skeleton = skeleton
        self.weights = weights
        """None where nobody asks for them."""
        self.hooks = hooks
        """What gradients go through, by all names that parameters have."""

    @classmethod
    def skeleton_of(cls, model: object) -> LiveModel:
        """Return a model's skeleton alone.

        Raises ConfigError for what is no model of these kinds, or has something that stages could not have as it is.
        """
        inner = unwrapped(model)
        if not isinstance(inner, LiveKind):
            raise ConfigError(
                f"Trainer(model=…): {type(inner).__name__} is no model of transformers; write a job() whose model is a "
                "list of layers"
            )
        if isinstance(inner, PreTrainedModel):
            require_one_stack(inner)
            task_of_built(inner)  # a head that no task is known for is refused before anything is copied
        require_trainable(inner)
        hooks = gradient_hooks(inner)
        skeleton = _without_memory(inner)
        modules: Iterable[Any] = skeleton.modules()
        for module in modules:
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # stages do it themselves, where the job says so
        return cls(skeleton, None, hooks)

    @classmethod
    def taken_apart(cls, model: object, cache_dir: Path) -> LiveModel:
        """Return a model's skeleton, and its weights in a file; all memory is taken from the model itself.

        Raises as `skeleton_of`, and ResourceLost where the file cannot be written.
        """
        live = cls.skeleton_of(model)
        inner = unwrapped(model)
        assert isinstance(inner, nn.Module)
        weights = LiveWeights.saved(inner, cache_dir)
        for parameter in inner.parameters():
            parameter.data = parameter.data.new_empty(0)
        return cls(live._skeleton, weights, live.hooks)

    def make(self) -> LiveKind:
        """Return a copy of the skeleton: parameters without memory, buffers with their values."""
        return _without_memory(self._skeleton)


def _without_memory(model: LiveKind) -> LiveKind:
    """Copy a model: parameters on the meta device, with their own attributes, and all else as it is.

    Raises ConfigError for a model that cannot be copied.
    """
    empty: dict[int, Any] = {}
    for each in model.parameters():
        empty[id(each)] = nn.Parameter(each.detach().to("meta"), each.requires_grad)
        vars(empty[id(each)]).update(vars(each))
    try:
        return copy.deepcopy(model, empty)
    # What it holds may be anything.
    except Exception as error:
        raise ConfigError(
            f"model: it cannot be copied for the nodes ({' '.join(str(error).split())}): keep in it what copy.deepcopy "
            f"can copy{_culprit(model)}"
        ) from error


def _culprit(model: nn.Module) -> str:
    """Name an attribute that is a tensor in the middle of a computation, as older weight norms leave behind."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                return f"; {path}.{attribute} is computed from parameters: use torch.nn.utils.parametrizations"
    return ""


class LiveWeights:
    """The weights of a live model, all of them, in a file."""

    is_whole = True

    def __init__(self, file: Path, digest: str, names: Mapping[str, str]) -> None:
        """`names` has what the file calls a parameter, under each name that it has in the model."""
        self._file = file
        self._digest = digest
        self._names = names

    @classmethod
    def saved(cls, model: nn.Module, cache_dir: Path) -> LiveWeights:
        """Write a model's parameters and persistent buffers, each once, unless the file is there.

        Raises ResourceLost if that fails.
        """
        homes: dict[int, str] = {}
        names = {name: homes.setdefault(id(each), name) for name, each in named_state(model)}
        tensors = {name: each.detach().contiguous() for name, each in named_state(model) if names[name] == name}
        digest = _digest_of({**tensors, **dict(model.named_buffers())})
        file = cache_dir / f"start-{digest}.safetensors"
        if not file.exists():
            unfinished = file.with_name(f".{file.name}.{os.getpid()}")
            try:
                cache_dir.mkdir(parents=True, exist_ok=True)
                save_file({name: tensor.cpu() for name, tensor in tensors.items()}, unfinished)
                unfinished.replace(file)
            except (OSError, SafetensorError) as error:
                raise ResourceLost(f"the model's weights cannot be written to {file}: {error}") from error
            finally:
                unfinished.unlink(missing_ok=True)
        return cls(file, digest, names)

    def digest(self) -> str:
        """Digest all of the weights, and their names."""
        return self._digest

    def names_in_files(self, parameters: Iterable[str]) -> dict[str, str]:
        """Return what the file calls parameters."""
        return {name: self._names[name] for name in parameters}

    def read(self, names: Iterable[str], model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """Return the parameters of these names. Raises ResourceLost where the file is gone."""
        try:
            with safe_open(self._file, framework="pt") as file:
                return {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ResourceLost(f"{self._file}, with the weights that training starts from: {error}") from error

    def known(self, names: Iterable[str], model: nn.Module, *, renamed: bool = False) -> tuple[str, ...]:
        """Return those of some parameters that the file has: all of them."""
        return tuple(names)


def _digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}{tuple(tensor.shape)};".encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- values of a job()'s model --------------------------------------------------------------------------------------


def own_value_of(make: Callable[[], nn.Module]) -> str | None:
    """Return the name of a parameter or buffer that `make`, which builds a model on the meta device, gives its value.

    None where all values are those of the model's rules. Raises what `make` raises.
    """
    origins = _Origins()
    with warnings.catch_warnings(), _noting_rules_of_models(origins), origins:
        warnings.simplefilter("ignore")  # of values that are lost on the meta device, among others
        model = make()
    of_models = {id(inner) for each in model.modules() if isinstance(each, PreTrainedModel) for inner in each.modules()}
    for path, module in model.named_modules():
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{path}.{attribute}" if path else attribute
            allowed = {_Origin.NOWHERE, _Origin.MODEL if id(module) in of_models else _Origin.LAYER}
            if is_adapter(name):
                allowed = {_Origin.LAYER, _Origin.ADAPTER}
            if tensor is not None and origins.of(tensor) not in allowed:
                return name
    return None


class _Origin(enum.Enum):
    """Where a tensor's values come from."""

    NOWHERE = enum.auto()
    """It is memory as it was found."""
    LAYER = enum.auto()
    """The rules of a layer."""
    MODEL = enum.auto()
    """Those of a transformers model."""
    ADAPTER = enum.auto()
    SCRIPT = enum.auto()


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as the next two: torch has it untyped
    """Notes the origin of the values in each tensor's memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: dict[int, tuple[_Origin, torch.UntypedStorage]] = {}
        """By the address of what describes it, which is not free for another as long as it is in here."""

    def of(self, tensor: torch.Tensor) -> _Origin:
        """Return a tensor's origin: the script for one that was there before."""
        known = self._memory.get(tensor.untyped_storage()._cdata)
        return _Origin.SCRIPT if known is None else known[0]

    def note(self, tensors: Iterable[object], origin: _Origin) -> None:
        """Note where values come from."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                self._memory[storage._cdata] = (origin, storage)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        schema = func._schema
        written = [
            args[index] if index < len(args) else given.get(argument.name)
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            self.note(_flat(written), _origin_of_now())
        else:
            new = [each for each in _flat([result]) if self._is_new(each)]
            if new:
                self.note(new, self._origin_of_new(schema.name, args))
        return result

    def _is_new(self, value: object) -> bool:
        is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        return is_dense and value.untyped_storage()._cdata not in self._memory  # type: ignore[attr-defined]  # a tensor

    def _origin_of_new(self, operation: str, args: tuple[Any, ...]) -> _Origin:
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
    """What is being run: a rule, which is called without arguments when a node calls it, or anything else."""
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
    """Within the block, note which models transformers applies their rules to.

    It ends the making of each with that, and leaves it out on the meta device: no operation would tell.
    """
    apply = PreTrainedModel.init_weights

    def init_weights(model: PreTrainedModel) -> None:
        apply(model)  # type: ignore[no-untyped-call]
        origins.note((*model.parameters(), *model.buffers()), _Origin.MODEL)

    PreTrainedModel.init_weights = init_weights  # type: ignore[method-assign]  # until the end of the block
    try:
        yield
    finally:
        PreTrainedModel.init_weights = apply  # type: ignore[method-assign]
