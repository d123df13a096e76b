"""A model that a script has made, with the weights that training starts from: taken apart.

Stages are copies of its skeleton, which has no memory. Its weights go into a file in the node's cache, named after
their digest, from which each worker reads its own layers.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from oobleck.errors import ConfigError, ResourceLost, UncutModel

from .adapters import adapters_of, unwrapped
from .brought import GradientHook, gradient_hooks, named_state, require_trainable
from .configuration import task_of_built
from .layered_model import SplittableModel
from .splitting import require_one_stack


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model's skeleton, and its weights."""

    _skeleton: nn.Module
    weights: LiveWeights | None
    """None for a skeleton alone."""
    hooks: Mapping[str, tuple[GradientHook, ...]]
    """The hooks on gradients, under every name that their parameter has."""

    @classmethod
    def skeleton_of(cls, model: object, *, is_whole: bool = False) -> LiveModel:
        """Return a model's skeleton alone. With `is_whole`, any module is a model.

        Raises UncutModel for one that is none of transformers, and ConfigError for any other object, and for a model
        with a part that stages could not copy faithfully.
        """
        inner = unwrapped(model)
        if not isinstance(inner, nn.Module):
            raise ConfigError(f"Trainer(model=…): {type(inner).__name__} is not a torch module")
        if not is_whole and not isinstance(inner, SplittableModel):
            adapters_of(inner)  # says more of PEFT's models
            raise UncutModel(f"model: {type(inner).__name__} is not a model of transformers")
        if isinstance(inner, PreTrainedModel) and not is_whole:
            require_one_stack(inner)
            task_of_built(inner)  # refuses a head without a known task before anything is copied
        require_trainable(inner)
        hooks = gradient_hooks(inner)
        skeleton = _without_memory(inner)
        modules: Iterable[Any] = skeleton.modules()
        for module in modules:
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # stages do it themselves, if the job says so
        return cls(skeleton, None, hooks)

    @classmethod
    def taken_apart(cls, model: object, cache_dir: Path, *, is_whole: bool = False) -> LiveModel:
        """Return a model's skeleton, and its weights in a file. The model itself loses its memory.

        Raises ConfigError as `skeleton_of`, and ResourceLost where the file cannot be written.
        """
        live = cls.skeleton_of(model, is_whole=is_whole)
        inner = unwrapped(model)
        assert isinstance(inner, nn.Module)
        weights = LiveWeights.saved(inner, cache_dir)
        for parameter in inner.parameters():
            parameter.data = parameter.data.new_empty(0)
        return cls(live._skeleton, weights, live.hooks)

    def make(self) -> nn.Module:
        """Return a copy of the skeleton: parameters without memory, buffers with their values."""
        return _without_memory(self._skeleton)


def _without_memory(model: nn.Module) -> nn.Module:
    """Copy a model with parameters on the meta device. Raises ConfigError for a model that cannot be copied."""
    empty: dict[int, Any] = {}
    for each in model.parameters():
        empty[id(each)] = nn.Parameter(each.detach().to("meta"), each.requires_grad)
        vars(empty[id(each)]).update(vars(each))
    try:
        # deepcopy takes what the memo has under an object's id for its copy, so no parameter is copied with its memory.
        return copy.deepcopy(model, empty)
    # The model may hold any object, and copying it may fail in any way.
    except Exception as error:
        raise ConfigError(
            f"model: it cannot be copied for the nodes ({' '.join(str(error).split())}): keep in it what copy.deepcopy "
            f"can copy{_culprit(model)}"
        ) from error


def _culprit(model: nn.Module) -> str:
    """Name an attribute that is a computed tensor, which older weight norms leave behind."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                return f"; {path}.{attribute} is computed from parameters: use torch.nn.utils.parametrizations"
    return ""


@dataclass(frozen=True, slots=True)
class LiveWeights:
    """A file with all weights of a live model."""

    is_whole: ClassVar[bool] = True
    _file: Path
    _digest: str
    _names: Mapping[str, str]
    """The name in the file, keyed by every name that a parameter has in the model."""

    @classmethod
    def saved(cls, model: nn.Module, cache_dir: Path) -> LiveWeights:
        """Write a model's parameters and persistent buffers, each once, unless the file exists.

        Raises ResourceLost if the file cannot be written.
        """
        homes: dict[int, str] = {}
        names = {name: homes.setdefault(id(each), name) for name, each in named_state(model)}
        tensors = {name: each.detach().contiguous() for name, each in named_state(model) if names[name] == name}
        digest = _digest_of({**tensors, **dict(model.named_buffers())})
        file = cache_dir / f"start-{digest}.safetensors"
        if not file.exists():
            # Workers of a machine share the file and may write it at the same time, so each replaces it as a whole.
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
        return self._digest

    def names_in_files(self, parameters: Iterable[str]) -> dict[str, str]:
        return {name: self._names[name] for name in parameters}

    def read(self, names: Iterable[str], model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """Return the parameters of these names. Raises ResourceLost where the file cannot be read."""
        try:
            with safe_open(self._file, framework="pt") as file:
                return {name: file.get_tensor(self._names[name]) for name in names}
        except (OSError, SafetensorError) as error:
            raise ResourceLost(f"{self._file}, with the weights that training starts from: {error}") from error

    def known(self, names: Iterable[str], model: nn.Module, *, renamed: bool = False) -> tuple[str, ...]:
        return tuple(names)


def _digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}{tuple(tensor.shape)};".encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
