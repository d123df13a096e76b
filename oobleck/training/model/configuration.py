"""From a job's model specification to a transformers configuration and the class that it configures.

It covers causal and masked language models, and heads that classify samples or tokens. This module and `splitting` find
every mistake that a user can make in a specification, before anything is allocated.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from oobleck.errors import ConfigError, UncutModel
from oobleck.job import ModelSpec, Scalar, Task, check_model_numbers
from oobleck.training.fetched import model_directory

CLASSIFICATION: tuple[Task, ...] = ("sequence_classification", "token_classification")

_HEADS: Mapping[Task, tuple[Any, Mapping[str, Any]]] = {
    "causal_lm": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked_lm": (AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "sequence_classification": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "token_classification": (AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
}
"""The builder of models with the head of each task, and the classes' names, keyed by model type."""

CAUSAL_LM_LOSS = "ForCausalLM"
"""Transformers' name for the loss of a causal language model."""

TWO_STACKS = (
    "every block of its decoder reads the encoder's output for all tokens, and pipelines pass hidden states only from "
    "one block to the next"
)
"""The reason why encoder-decoders are not cut."""
_TWO_STACKS_IN_A_JOB = f"{TWO_STACKS}; train it by the script of an oobleck.transformers.Trainer, which keeps it whole"


_KNOWN_PACKAGES = ("transformers", "torch", "accelerate", "peft", "contextlib", "functools")
"""Packages that write forward passes and losses of transformers' models, or wrap them unchanged."""

_END_OF_TEXT = 0
"""The tokenizer's end-of-text token (see `tokenizer`), repeated to keep that package out of models."""

_INTERNAL_KEYS = frozenset(
    {"architectures", "dtype", "transformers_version", "id2label", "label2id", "problem_type", "return_dict"}
)


def task_of(model: ModelSpec, config: PreTrainedConfig) -> Task:
    """Return a model's task, by default that of the head saved in its directory.

    Raises ConfigError for a task that the model's type has no head for.
    """
    if model.task is None and model.path is not None and _is_saved_encoder_decoder(config):
        raise ConfigError(f"model.path: the model in {model.path} is an encoder-decoder: {_TWO_STACKS_IN_A_JOB}")
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_encoder = masked and not getattr(config, "is_decoder", False) and not config.is_encoder_decoder
    saved = None if model.path is None else _task_of_classes(config.architectures or ())
    task: Task = model.task or saved or ("masked_lm" if is_encoder else "causal_lm")
    if config.model_type not in _HEADS[task][1]:
        raise ConfigError(f"model.task: {config.model_type} has no head for {task}")
    return task


def _is_saved_encoder_decoder(config: PreTrainedConfig) -> bool:
    both = _class_names(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    return config.is_encoder_decoder and not both.isdisjoint(config.architectures or ())


def task_of_built(model: PreTrainedModel) -> Task:
    """Return the task of a model's head, by the name of its class or of a base class.

    A user's own class that can generate is a causal language model. Raises ConfigError for an unknown head.
    """
    kind = type(model)
    if (task := _task_of_classes(base.__name__ for base in kind.__mro__)) is not None:
        return task
    if isinstance(model, GenerationMixin) and not kind.__module__.startswith("transformers."):
        return "causal_lm"
    raise UncutModel(
        f"model: {kind.__name__} has a head that no task is known for; known are {', '.join(_HEADS)}, as those of "
        "LlamaForCausalLM, BertForMaskedLM, BertForSequenceClassification and BertForTokenClassification: use such a "
        "class, or derive your own from it",
        reason=f"its head is none of those that can be cut ({', '.join(_HEADS)})",
    )


def require_known_loss(model: PreTrainedModel, task: Task) -> None:
    """Raise ConfigError for a model whose own loss would be ignored, as tasks with plain labels do."""
    if task == "causal_lm":
        return
    forward = vars(model).get("forward", type(model).forward)
    own = _written_elsewhere(forward)
    # Many of transformers' classes, such as BERT's, compute their loss themselves, and never ask for a loss_function.
    if own is None and ("_loss_function" in vars(model) or _asks_for_loss_function(forward)):
        own = _written_elsewhere(model.loss_function)
    if own is not None or "_loss_function" in vars(model):
        raise UncutModel(
            f"model: {type(model).__name__} has a forward or a loss_function of its own{_place_of(own)}, and for "
            f"{task} the loss is always the cross entropy of its logits; set Trainer(compute_loss_func=…)",
            reason=f"it has a forward or a loss_function of its own{_place_of(own)}",
        )


def _written_elsewhere(function: Any) -> Any:
    """Return the function, or one that it wraps, that is not of a known package; None if all are."""
    # `functools.wraps` copies a function's name and `__module__`; its globals are those of where it was written.
    while function is not None:
        function = getattr(function, "__func__", function)
        inner = getattr(function, "func", function)  # of functools.partial
        written_in = getattr(inner, "__globals__", {}).get("__name__") or type(inner).__module__
        if written_in.partition(".")[0] not in _KNOWN_PACKAGES:
            return inner
        function = getattr(function, "__wrapped__", None)
    return None


def _asks_for_loss_function(forward: Any) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is None or "loss_function" in code.co_names


def _place_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({code.co_qualname}, line {code.co_firstlineno} of {Path(code.co_filename).name})"


def _task_of_classes(names: Iterable[str]) -> Task | None:
    found = frozenset(names)
    return next((task for task, (_, known) in _HEADS.items() if found.intersection(_class_names(known))), None)


def check_head(model: PreTrainedModel, task: Task) -> None:
    """Raise ConfigError for a classification head that does not predict one label of several."""
    config, kind = model.config, type(model).__name__
    if task not in CLASSIFICATION:
        return
    if not (config.num_labels or 0) >= 2 or config.problem_type not in (None, "single_label_classification"):
        problem = config.problem_type or "regression"
        raise UncutModel(
            f"model.config.num_labels: {config.num_labels} ({problem}) is not supported for {kind}; a head predicts "
            "one of two labels or more",
            reason=f"its head is one for {problem.replace('_', ' ')}",
        )
    if task == "sequence_classification" and not isinstance(getattr(config, "pad_token_id", None), int):
        raise ConfigError(
            f"model.config.pad_token_id: set it for {kind}; the padding after a sample marks its last token"
        )


def _class_names(known: Mapping[str, Any]) -> set[str]:
    """Return the names of all classes; a type of models may have several for a task."""
    return {name for each in known.values() for name in ([each] if isinstance(each, str) else each)}


def build_config(model: ModelSpec, *, vocab_size: int, sequence_length: int) -> PreTrainedConfig:
    """Return the configuration that `model` describes, for a tokenizer of `vocab_size` tokens.

    Raises:
        ConfigError: unknown type or key, a value that the configuration refuses, a vocabulary smaller than
            the tokenizer's, or fewer positions than `sequence_length`.
    """
    config = _new_config(model, vocab_size=vocab_size) if model.path is None else _saved_config(model, model.path)
    check_model_numbers({key: getattr(config, key, None) for key in ("num_hidden_layers", "hidden_size", "vocab_size")})
    _require_room(config, vocab_size=vocab_size, sequence_length=sequence_length)
    return config


def with_padding(model: ModelSpec) -> ModelSpec | None:
    """Return the specification with a padding token, for a type that does not run without one.

    Returns None where the specification sets the token itself, or the type has none.
    """
    if model.path is not None or "pad_token_id" in model.config:
        return None
    fields = {each.name: each.default for each in dataclasses.fields(_config_class(model.type))}
    if not isinstance(fields.get("pad_token_id"), int):
        return None
    return dataclasses.replace(model, config={**model.config, "pad_token_id": _END_OF_TEXT})


def _new_config(model: ModelSpec, *, vocab_size: int) -> PreTrainedConfig:
    config_class = _config_class(model.type)
    _require_known_keys(model, config_class)
    values: dict[str, Scalar] = {**_defaults(config_class, vocab_size=vocab_size), **model.config}
    try:
        return config_class(**values)  # type: ignore[arg-type]  # checked by the class itself
    # Configuration classes raise various errors: dataclass validation, TypeError, ValueError, KeyError.
    except Exception as error:
        raise ConfigError(f"model.config: {model.type} refuses it: {_one_line(error)}") from error


def _saved_config(model: ModelSpec, path: str) -> PreTrainedConfig:
    directory = model_directory(path, "model.path")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is not a directory with a config.json on this node")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, use_cache=False)
        _require_known_keys(model, type(config))
        for key, value in model.config.items():
            setattr(config, key, value)
    except ConfigError:
        raise
    # The same holds here, and the file may have any content.
    except Exception as error:
        raise ConfigError(f"model.path: the configuration in {path} cannot be used: {_one_line(error)}") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def _require_known_keys(model: ModelSpec, config_class: type[PreTrainedConfig]) -> None:
    known = _keys_of(config_class)
    for key in model.config:
        if key not in known:
            name = config_class.model_type
            raise ConfigError(f"model.config.{key}: {name} has no such key{_suggestion(key, known)}")


def auto_class(task: Task) -> Any:
    """Return the builder of models with the head of a task."""
    return _HEADS[task][0]


def build_model(config: PreTrainedConfig, *, task: Task, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model in training mode; torch's contexts choose the device, or fake tensors.

    Raises ConfigError where the model's class refuses the configuration.
    """
    try:
        own = copy.deepcopy(config)  # a model writes to its configuration
        model: object = auto_class(task).from_config(own, dtype=dtype)
    # A model's constructor may refuse its configuration with any error.
    except Exception as error:
        raise ConfigError(f"model.config: {config.model_type} cannot be built: {_one_line(error)}") from error
    assert isinstance(model, PreTrainedModel)
    return prepared(model)


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """Put a new model into training mode, and name its loss."""
    if getattr(model, "loss_type", None) is None:
        # Transformers would fall back to the same loss, with a warning.
        model.loss_type = CAUSAL_LM_LOSS
    model.train()
    return model


def _config_class(model_type: str) -> type[PreTrainedConfig]:
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    if model_type not in known and model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"model.type: {model_type} is an encoder-decoder: {_TWO_STACKS_IN_A_JOB}")
    if model_type not in known:
        raise ConfigError(f"model.type: {model_type!r} is not a language model{_suggestion(model_type, known)}")
    config_class = CONFIG_MAPPING[model_type]
    assert issubclass(config_class, PreTrainedConfig)
    return config_class


def _keys_of(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    fields = {"num_labels", *(field.name for field in dataclasses.fields(config_class))}
    return frozenset((fields | set(config_class.attribute_map)) - _INTERNAL_KEYS)


def _defaults(config_class: type[PreTrainedConfig], *, vocab_size: int) -> dict[str, Scalar]:
    defaults: dict[str, Scalar] = {"vocab_size": vocab_size, "use_cache": False}
    for field in dataclasses.fields(config_class):
        if field.name in ("bos_token_id", "eos_token_id"):
            defaults[field.name] = _END_OF_TEXT
        elif field.name == "pad_token_id":
            # Nothing is padded, and the embedding of a padding token never learns.
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
