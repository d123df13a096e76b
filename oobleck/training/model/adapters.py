"""LoRA adapters, by PEFT: put into a model, found in one that a script made, initialized, told from the rest of it.

PEFT puts a module of its own around each one that it adapts, which keeps the original as `base_layer`; a module that is
trained as a whole is copied, and the copy used. So what a model's files call `h.0.attn.c_attn.weight` is here called
`h.0.attn.c_attn.base_layer.weight`: `plain_name` leads back.

PEFT is an extra, and takes a second or two to import: only models with adapters have it imported.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.job import LoraSpec, Task

from .brought import shared_tensors

Model = TypeVar("Model", bound=nn.Module)

_ADAPTER = "default"
"""What PEFT calls an adapter that was given no name."""
_HEADS = ("classifier", "score")
"""What PEFT trains beside the adapters where labels are predicted: a head that is new."""
_TASK_TYPES: Mapping[Task, str | None] = {
    "causal_lm": "CAUSAL_LM",
    "masked_lm": None,
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
}
_WRAPPING = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
_OWN = re.compile(r"\.lora_\w+\.")
_INITIALIZATIONS = (True, "gaussian")
"""Those that draw numbers, and leave the model as it is; others depend on weights, which no stage has all of."""
_UNFIT = (
    "use_dora", "layer_replication", "trainable_token_indices", "target_parameters", "alora_invocation_tokens",
    "megatron_config", "loftq_config", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config",
    "monteclora_config",
)  # fmt: skip
"""Keys of PEFT's LoraConfig whose adapters depend on the weights, or on more than a layer."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model."""

    config: Any
    """PEFT's LoraConfig, with the modules that it has found."""

    def as_json(self) -> str:
        """What PEFT needs to make them again."""
        values = {key: sorted(value) if isinstance(value, set) else value for key, value in self._values().items()}
        return json.dumps(values, sort_keys=True)

    def _values(self) -> Mapping[str, Any]:
        values: Mapping[str, Any] = self.config.to_dict()
        return values

    @classmethod
    def from_json(cls, text: str) -> Adapters:
        """The inverse of `as_json`. Raises ConfigError where PEFT is not installed, or of another mind."""
        peft = _import_peft()
        try:
            return cls(peft.PeftConfig.from_peft_type(**json.loads(text)))
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"its adapters cannot be made by this version of PEFT ({error})") from error


def new_adapters(lora: LoraSpec, *, task: Task, base: str | None) -> Adapters:
    """Return the adapters that a job asks for; `base` is the directory of the model that they are for.

    Raises ConfigError where PEFT is not installed, or refuses them.
    """
    peft = _import_peft()
    heads = _HEADS if task in ("sequence_classification", "token_classification") else ()
    targets: list[str] | str | None = list(lora.target_modules) or None
    try:
        config = peft.LoraConfig(
            r=lora.r,
            lora_alpha=lora.lora_alpha,
            lora_dropout=lora.lora_dropout,
            target_modules="all-linear" if targets == ["all-linear"] else targets,
            modules_to_save=[*lora.modules_to_save, *heads] or None,
            bias=lora.bias,
            use_rslora=lora.use_rslora,
            task_type=_TASK_TYPES[task],
            base_model_name_or_path=base,
        )
    except (TypeError, ValueError) as error:
        raise _refused(error) from error
    return Adapters(config)


def add_adapters(model: PreTrainedModel, adapters: Adapters) -> Any:
    """Put adapters into a model, and freeze the rest of it; returns PEFT's LoraModel, which can take them in.

    Raises ConfigError where PEFT refuses that.
    """
    peft = _import_peft()
    try:
        with warnings.catch_warnings():
            # Of how GPT-2's weights lie, which it finds by itself, and of what `tied_parameters` refuses.
            warnings.filterwarnings("ignore", message="fan_in_fan_out|Model has `tie_word_embeddings")
            tuner = peft.LoraModel(model, adapters.config, _ADAPTER)
    # What PEFT raises for modules that are not there, or are of a kind that it cannot adapt, is its own choice.
    except Exception as error:
        raise _refused(error) from error
    model.train()
    return tuner


def save_adapters(model: PreTrainedModel, adapters: Adapters, directory: Path) -> None:
    """Write a model's adapters alone, as PEFT's `save_pretrained` does, into a directory that is there."""
    peft = _import_peft()
    state = peft.get_peft_model_state_dict(model)
    named = {f"base_model.model.{name}": tensor.detach().contiguous() for name, tensor in state.items()}
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    adapters.config.save_pretrained(directory)


def unwrapped(built: object) -> object:
    """Return the model within one of PEFT's, with its adapters; anything else as it is. Raises ConfigError."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(built, peft.PeftModel):
        return built
    if built.active_peft_config.is_prompt_learning:
        kind = built.active_peft_config.peft_type.value
        raise ConfigError(f"the script's model: {kind} changes the samples, not the layers; use LoRA")
    inner: object = built.get_base_model()
    return inner


def adapters_of(model: nn.Module) -> Adapters | None:
    """Return the adapters in a model, None where there are none. Raises ConfigError for those that it cannot train."""
    found: Mapping[str, Any] | None = getattr(model, "peft_config", None)
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(f"model: it has the adapters {', '.join(found)}; one can be trained at a time")
    ((name, config),) = found.items()
    if name != _ADAPTER:
        raise ConfigError(f"model: its adapter is called {name!r}; leave the name out")
    if config.peft_type.value != "LORA":
        raise ConfigError(f"model: its adapters are {config.peft_type.value}; those of LoRA are supported")
    for key in _UNFIT:
        if getattr(config, key, None):
            raise ConfigError(f"model: LoRA with {key} is not supported; leave it out")
    if config.init_lora_weights not in _INITIALIZATIONS:
        raise ConfigError(
            f"model: LoRA's init_lora_weights {config.init_lora_weights!r} is not supported: it is computed "
            "from weights, and these are spread over nodes. Use True or gaussian"
        )
    return Adapters(config)


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is one that PEFT has put around another: both are one, and are called as one."""
    return "peft" in sys.modules and isinstance(module, _wrappers())


def is_adapter(parameter: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter, so that no model's files have it."""
    return _OWN.search(parameter) is not None


def original_of(module: nn.Module) -> nn.Module:
    """Return what PEFT has put a module around; any other module as it is."""
    if not is_adapted(module):
        return module
    return original_of(module.get_submodule("base_layer" if hasattr(module, "base_layer") else "original_module"))


def plain_name(name: str) -> str:
    """Return what a module or a parameter is called in the model without adapters."""
    return _WRAPPING.sub("", name)


def tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Return the names of parameters and persistent buffers that are another one, and that other one's name.

    Raises ConfigError where one of them is adapted or trained as a whole: the other would not have what it learns.
    """
    shared = shared_tensors(model, dict(model.all_tied_weights_keys or {}))
    for name in sorted({*shared, *shared.values()}):
        if plain_name(name) != name:
            raise ConfigError(f"model: {plain_name(name)} is tied, so it can have no adapter; name other modules")
    return shared


def initialize_adapter(model: nn.Module, module: nn.Module) -> None:
    """Set the adapter of an adapted module, if it has one, to its initial values, which leave the model as it is.

    Draws from torch's generator.
    """
    reset: Any = getattr(module, "reset_lora_parameters", None)
    if reset is not None:
        config = getattr(model, "peft_config", {}).get(_ADAPTER)
        reset(_ADAPTER, True if config is None else config.init_lora_weights)


def with_fake_tensors(model: Model) -> Model:
    """Give a model from the meta device fake parameters and buffers, in the mode that is on; returns it.

    Models are not made of fake tensors from the beginning: PEFT cannot put adapters into those, and rules for
    initialization that look at what they have drawn do not run on them.
    """
    faked: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        """What is tied stays one object."""
        if id(tensor) not in faked:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            faked[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return faked[id(tensor)]

    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
        for held in holders:
            for name, tensor in [*held.items()]:
                if isinstance(tensor, torch.Tensor):
                    held[name] = fake(tensor)
    return model


def _wrappers() -> tuple[type, ...]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return BaseTunerLayer, AuxiliaryTrainingWrapper


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora: PEFT cannot be loaded ({error}); pip install 'oobleck[peft]'") from error
    return peft


def _refused(error: Exception) -> ConfigError:
    return ConfigError(f"model.lora: PEFT refuses it: {' '.join(str(error).split())}")
