"""LoRA adapters of PEFT: add them to a model, find them in a script's, initialize them, and recognize their names.

PEFT wraps each adapted module in its own, which keeps the original as `base_layer`; of a module that is trained whole,
it makes and uses a copy. So the model's `h.0.attn.c_attn.base_layer.weight` is `h.0.attn.c_attn.weight` in files;
`plain_name` returns the latter.
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

from oobleck.errors import ConfigError, UncutModel
from oobleck.job import LoraSpec, Task

from .brought import shared_tensors

Model = TypeVar("Model", bound=nn.Module)

_ADAPTER = "default"
"""PEFT's default name of an adapter."""
_HEADS = ("classifier", "score")
"""The new heads of classifiers, which PEFT trains as well as the adapters."""
_TASK_TYPES: Mapping[Task, str | None] = {
    "causal_lm": "CAUSAL_LM",
    "masked_lm": None,
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
}
_WRAPPING = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
_OWN = re.compile(r"\.lora_\w+\.")
_INITIALIZATIONS = (True, "gaussian")
"""These draw numbers, and leave the model's function unchanged; others depend on weights, and no stage has them all."""
_UNFIT = (
    "use_dora", "layer_replication", "trainable_token_indices", "target_parameters", "alora_invocation_tokens",
    "megatron_config", "loftq_config", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config",
    "monteclora_config",
)  # fmt: skip
"""Keys of PEFT's LoraConfig whose adapters depend on the weights, or on more than one layer."""


@dataclass(frozen=True, slots=True)
class Adapters:
    config: Any
    """PEFT's LoraConfig, with the modules that it has found."""

    def as_json(self) -> str:
        """Return PEFT's configuration as JSON."""
        return json.dumps(self.config.to_dict(), sort_keys=True, default=sorted)  # it has sets of modules' names

    @classmethod
    def from_json(cls, text: str) -> Adapters:
        """Invert `as_json`. Raises ConfigError if PEFT is not installed, or does not accept the configuration."""
        peft = _import_peft()
        try:
            return cls(peft.PeftConfig.from_peft_type(**json.loads(text)))
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"its adapters cannot be made by this version of PEFT ({error})") from error


def new_adapters(lora: LoraSpec, *, task: Task, base: str | None) -> Adapters:
    """Return a job's adapters; `base` is the directory of their model.

    Raises ConfigError if PEFT is not installed, or refuses them.
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
    """Add adapters to a model and freeze the rest of it; return PEFT's LoraModel, which can merge them.

    Raises ConfigError if PEFT refuses them.
    """
    peft = _import_peft()
    try:
        with warnings.catch_warnings():
            # PEFT warns about GPT-2's transposed weights, which it handles, and about ties, which we refuse ourselves.
            warnings.filterwarnings("ignore", message="fan_in_fan_out|Model has `tie_word_embeddings")
            tuner = peft.LoraModel(model, adapters.config, _ADAPTER)
    # PEFT raises various errors for modules that are missing or that it cannot adapt.
    except Exception as error:
        raise _refused(error) from error
    model.train()
    return tuner


def save_adapters(model: PreTrainedModel, adapters: Adapters, directory: Path) -> None:
    """Write only a model's adapters, as PEFT's `save_pretrained` does, into an existing directory."""
    peft = _import_peft()
    state = peft.get_peft_model_state_dict(model)
    named = {f"base_model.model.{name}": tensor.detach().contiguous() for name, tensor in state.items()}
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    adapters.config.save_pretrained(directory)


def unwrapped(built: Any) -> Any:
    """Return the model within a PeftModel, with its adapters, if these are layers of it; anything else unchanged."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(built, peft.PeftModel):
        return built
    try:
        adapters_of(built)
    except UncutModel:
        return built
    return built.get_base_model()


def adapters_of(model: object) -> Adapters | None:
    """Return the adapters in a model, if any. Raises UncutModel for adapters that no stage alone could make."""
    found: Mapping[str, Any] | None = getattr(model, "peft_config", None)
    if not found:
        return None
    if len(found) > 1:
        raise UncutModel(f"model: it has the adapters {', '.join(found)}; one can be trained at a time")
    ((name, config),) = found.items()
    if name != _ADAPTER:
        raise UncutModel(f"model: its adapter is called {name!r}; leave the name out")
    kind = config.peft_type.value
    if config.is_prompt_learning:
        raise UncutModel(f"model: {kind} changes the samples, not the layers; use LoRA")
    if kind != "LORA":
        raise UncutModel(f"model: its adapters are {kind}; those of LoRA are supported")
    for key in _UNFIT:
        if getattr(config, key, None):
            raise UncutModel(f"model: LoRA with {key} is not supported; leave it out")
    if config.init_lora_weights not in _INITIALIZATIONS:
        raise UncutModel(
            f"model: LoRA's init_lora_weights {config.init_lora_weights!r} is not supported: it is computed "
            "from weights, and these are spread over nodes. Use True or gaussian"
        )
    return Adapters(config)


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is one of PEFT's wrappers around another."""
    # PEFT takes a second or two to import, and nothing is adapted where nothing has imported it.
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def is_adapter(parameter: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter, so that the model's files lack it."""
    return _OWN.search(parameter) is not None


def original_of(module: nn.Module) -> nn.Module:
    """Return the module that PEFT has wrapped; any other module unchanged."""
    if not is_adapted(module):
        return module
    return original_of(module.get_submodule("base_layer" if hasattr(module, "base_layer") else "original_module"))


def plain_name(name: str) -> str:
    """Return the name of a module or a parameter in the model without adapters."""
    return _WRAPPING.sub("", name)


def tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Return the canonical name of each parameter and persistent buffer that is the same object as another.

    Raises UncutModel where one of them is adapted or trained whole.
    """
    shared = shared_tensors(model, dict(model.all_tied_weights_keys or {}))
    for name in sorted({*shared, *shared.values()}):
        # An adapter on one use of a tied tensor would not change the other.
        if plain_name(name) != name:
            raise UncutModel(f"model: {plain_name(name)} is tied, so it can have no adapter; name other modules")
    return shared


def initialize_adapter(model: nn.Module, module: nn.Module) -> None:
    """Draw the initial values of a module's adapter, if it has one, from torch's generator.

    They leave the model's function unchanged.
    """
    reset: Any = getattr(module, "reset_lora_parameters", None)
    if reset is not None:
        config = getattr(model, "peft_config", {}).get(_ADAPTER)
        reset(_ADAPTER, True if config is None else config.init_lora_weights)


def with_fake_tensors(model: Model) -> Model:
    """Replace a meta model's parameters and buffers by fake ones, of the active FakeTensorMode; return the model."""
    # A model cannot be built of fake tensors: PEFT cannot adapt them, and rules for initialization that read what they
    # have drawn fail on them.
    faked: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in faked:  # tied ones stay one object
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


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora: PEFT cannot be loaded ({error}); pip install peft") from error
    return peft


def _refused(error: Exception) -> ConfigError:
    return ConfigError(f"model.lora: PEFT refuses it: {' '.join(str(error).split())}")
