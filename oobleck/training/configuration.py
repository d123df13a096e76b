"""From a job's model specification to a transformers configuration and the class that it configures.

Only causal language models are known here. Every mistake that a user can make in a specification is found
here or in `splitting`, before anything is allocated.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oobleck.errors import ConfigError
from oobleck.job import ModelSpec, Scalar

__all__ = ["CAUSAL_LM_LOSS", "build_config", "build_model", "model_types"]

CAUSAL_LM_LOSS = "ForCausalLM"
"""What transformers calls the loss of a causal language model."""

_END_OF_TEXT = 0
"""The tokenizer's end-of-text token (see `tokenizer`); said here again to keep that package out of models."""

_INTERNAL_KEYS = frozenset(
    {"architectures", "dtype", "transformers_version", "id2label", "label2id", "problem_type", "return_dict"}
)


def model_types() -> tuple[str, ...]:
    """Return the names of all causal language models that transformers has."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def build_config(model: ModelSpec, *, vocab_size: int, sequence_length: int) -> PreTrainedConfig:
    """Return the configuration that `model` describes, for a tokenizer of `vocab_size` tokens.

    Raises:
        ConfigError: unknown type or key, a value that the configuration refuses, a vocabulary smaller than
            the tokenizer's, or fewer positions than `sequence_length`.
    """
    config_class = _config_class(model.type)
    known = _keys_of(config_class)
    for key in model.config:
        if key not in known:
            raise ConfigError(f"model.config.{key}: {model.type} has no such key{_suggestion(key, known)}")
    values: dict[str, Scalar] = {**_defaults(config_class, vocab_size=vocab_size), **model.config}
    try:
        config = config_class(**values)  # type: ignore[arg-type]  # checked by the class itself
    # What a configuration class raises is its own choice: dataclass validation, TypeError, ValueError, KeyError.
    except Exception as error:
        raise ConfigError(f"model.config: {model.type} refuses it: {_one_line(error)}") from error
    _require_room(config, vocab_size=vocab_size, sequence_length=sequence_length)
    return config


def build_model(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model where torch's contexts say (a device, or fake tensors), in training mode.

    The configuration is copied, since a model writes to its own.

    Raises:
        ConfigError: the model's class refuses the configuration.
    """
    try:
        model: object = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)  # type: ignore[no-untyped-call]
    # A model's constructor may refuse its configuration with whatever its author chose.
    except Exception as error:
        raise ConfigError(f"model.config: {config.model_type} cannot be built: {_one_line(error)}") from error
    assert isinstance(model, PreTrainedModel)
    if getattr(model, "loss_type", None) is None:
        # What transformers falls back to, but not without a warning.
        model.loss_type = CAUSAL_LM_LOSS
    model.train()
    return model


def _config_class(model_type: str) -> type[PreTrainedConfig]:
    known = model_types()
    if model_type not in known:
        raise ConfigError(f"model.type: {model_type!r} is no causal language model{_suggestion(model_type, known)}")
    config_class = CONFIG_MAPPING[model_type]
    assert issubclass(config_class, PreTrainedConfig)
    return config_class


def _keys_of(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    fields = {field.name for field in dataclasses.fields(config_class)}
    return frozenset((fields | set(config_class.attribute_map)) - _INTERNAL_KEYS)


def _defaults(config_class: type[PreTrainedConfig], *, vocab_size: int) -> dict[str, Scalar]:
    """Return what holds where the user says nothing."""
    defaults: dict[str, Scalar] = {"vocab_size": vocab_size, "use_cache": False}
    for field in dataclasses.fields(config_class):
        if field.name in ("bos_token_id", "eos_token_id"):
            defaults[field.name] = _END_OF_TEXT
        elif field.name == "pad_token_id":
            # Nothing is padded, and a padding token would be a token that never learns.
            defaults[field.name] = None if "None" in str(field.type) else _END_OF_TEXT
    return defaults


def _require_room(config: PreTrainedConfig, *, vocab_size: int, sequence_length: int) -> None:
    if getattr(config, "vocab_size", vocab_size) < vocab_size:
        raise ConfigError(
            f"model.config.vocab_size: {config.vocab_size} is less than the tokenizer's {vocab_size}; "
            "leave it out, or lower data.vocab_size"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < sequence_length:
        key = type(config).attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise ConfigError(
            f"data.sequence_length: {sequence_length} is more than the model's {positions} positions; "
            f"lower it, or raise model.config.{key}"
        )


def _suggestion(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
