"""Converts checkpoints to and from directories of transformers' `save_pretrained`, or of torch's DCP.

    python -m oobleck.training.checkpoint.conversion hf CHECKPOINT DIRECTORY      merges adapters into the weights
    python -m oobleck.training.checkpoint.conversion peft CHECKPOINT DIRECTORY    adapters alone
    python -m oobleck.training.checkpoint.conversion dcp CHECKPOINT DIRECTORY     with the optimizer's state
    python -m oobleck.training.checkpoint.conversion import DIRECTORY CHECKPOINTS [MODEL]    MODEL for a DCP directory

It is a process of its own, so that the command line needs no torch. For unusable input it exits with 78, and the last
line on stderr gives the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
import transformers
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from oobleck.errors import ConfigError, CorruptCheckpoint, ExitCode
from oobleck.host.places import place_of
from oobleck.job import ModelSpec, Task
from oobleck.training import model as models

from . import dcp_format
from .imported import write_layers
from .weights import read_weights

_TRIAL_LENGTH = 16


def main() -> int:
    """Convert as the arguments demand, and return the exit status."""
    what, source, target, *model = sys.argv[1:]
    try:
        if what == "import" and model:
            sys.stdout.write(f"{dcp_format.import_state(Path(source), place_of(target, 'TARGET'), model=model[0])}\n")
        elif what == "dcp":
            _save_whole(partial(dcp_format.export_state, place_of(source, "WHERE")), Path(target))
        elif what == "import":
            sys.stdout.write(f"{import_model(Path(source), place_of(target, 'TARGET'))}\n")
        else:
            export_model(place_of(source, "WHERE"), Path(target), adapters_alone=what == "peft")
    except (ConfigError, CorruptCheckpoint, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    return 0


def export_model(checkpoint: Path, target: Path, *, adapters_alone: bool = False) -> None:
    """Write a checkpoint's weights as a model directory, with adapters merged, or as a directory of adapters alone.

    Verifies every file first. Raises CorruptCheckpoint, OSError, or ConfigError for a checkpoint whose model is not of
    transformers, or that lacks the adapters to write.
    """
    metadata, weights = read_weights(checkpoint)
    task = metadata.get("task", "causal_lm")
    if task not in get_args(Task):
        raise ConfigError(f"{checkpoint}: its task {task!r} is not known")
    adapters = models.Adapters.from_json(metadata["adapters"]) if "adapters" in metadata else None
    if adapters_alone and adapters is None:
        raise ConfigError(f"{checkpoint}: there are no adapters in it; export it as hf")
    config = _config_of(checkpoint, metadata)
    dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), torch.float32)
    if "class" in metadata:
        build: Callable[[PreTrainedConfig], PreTrainedModel] = partial(
            _whole_model, checkpoint, metadata["class"], dtype
        )
    else:
        build = partial(models.build_model, task=cast("Task", task), dtype=dtype)
    model = build(config)
    tuner = None if adapters is None else models.add_adapters(model, adapters)
    tied = json.loads(metadata["tied"])
    # The script may have tied or untied weights, whatever its configuration says.
    if models.tied_parameters(model) != tied:
        config.tie_word_embeddings = not config.tie_word_embeddings
        model = build(config)
        tuner = None if adapters is None else models.add_adapters(model, adapters)
    weights = _tied_as_trained(checkpoint, model, weights, tied) | _buffers(model, weights, metadata)
    aliases = models.tied_parameters(model).keys()
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if unexpected or set(missing) - aliases:
        raise ConfigError(f"{checkpoint}: its parameters are not those of its configuration: {[*missing, *unexpected]}")
    if adapters is not None and adapters_alone:
        _save_whole(partial(models.save_adapters, model, adapters), target)
        return
    if tuner is not None:
        model = tuner.merge_and_unload()
    model.tie_weights()
    _save_whole(model.save_pretrained, target)


def _whole_model(checkpoint: Path, name: str, dtype: torch.dtype, config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model that was kept whole. Raises ConfigError for a class that is not transformers' own."""
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise ConfigError(f"{checkpoint}: its model is of a class of the script; have the script save it after train()")
    model: PreTrainedModel = kind._from_config(config, dtype=dtype)
    return model


def _tied_as_trained(
    checkpoint: Path, model: PreTrainedModel, weights: Mapping[str, torch.Tensor], tied: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return weights with copies of tied ones that the model does not tie. Raises ConfigError if it ties others."""
    by_model = models.tied_parameters(model)
    if surplus := sorted(by_model.keys() - tied.keys()):
        raise ConfigError(
            f"{checkpoint}: {surplus[0]} was trained by itself, and the model's class ties it to "
            f"{by_model[surplus[0]]}; no directory can say that"
        )
    copies = {name: weights[home].clone() for name, home in tied.items() if name not in by_model}
    return {**weights, **copies}


def _buffers(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return the buffers in the model's original types, and register those that the script had added."""
    known = model.state_dict().keys()
    buffers: dict[str, torch.Tensor] = {}
    for name, dtype in json.loads(metadata["buffers"]).items():
        buffers[name] = weights[name].to(getattr(torch, dtype))
        path, _, attribute = name.rpartition(".")
        if name not in known:
            model.get_submodule(path).register_buffer(attribute, buffers[name])
    return buffers


def _save_whole(save: Callable[[Path], object], target: Path) -> None:
    # The model is written next to the target and renamed, so that a full disk never leaves half of one there.
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished{os.getpid()}")
    try:
        unfinished.mkdir()
        save(unfinished)
        if target.is_dir():
            # It is empty: the command has checked that.
            target.rmdir()
        unfinished.rename(target)
    # The library has its own error for failed writes.
    except SafetensorError as error:
        raise OSError(f"{target}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def import_model(source: Path, target: Path) -> Path:
    """Write a model directory's weights as a checkpoint of step 0 with a new optimizer, and return its path.

    Reads and writes one layer after the other. Raises ConfigError or OSError.
    """
    structure = models.ModelStructure.from_spec(
        ModelSpec(path=str(source)), vocab_size=1, sequence_length=_TRIAL_LENGTH
    )
    return write_layers(target, structure, _initial_layers(structure))


def _initial_layers(structure: models.ModelStructure) -> Iterator[dict[str, torch.Tensor]]:
    model = models.StageModel(structure, dtype=torch.float32, device="cpu")
    for layer in range(structure.num_layers):
        model.adopt(layer, layer + 1, {})
        model.initialize([layer], seed=0)
        yield {name: parameter.detach() for name, parameter in model.parameters.items()}
        model.adopt(layer, layer, {})


def _config_of(checkpoint: Path, metadata: dict[str, str]) -> PreTrainedConfig:
    try:
        values = json.loads(metadata["config"])
        model_type = values.pop("model_type")
        if model_type in CONFIG_MAPPING:
            return AutoConfig.for_model(model_type, **values)
        why = f"transformers has no model type {model_type!r}" if model_type else "its layers are of a script"
    except (KeyError, ValueError, TypeError) as error:
        why = str(error)
    raise ConfigError(
        f"{checkpoint}: not of a model of transformers ({why}); --format dcp exports the state of any model"
    )


if __name__ == "__main__":
    sys.exit(main())
