"""The model of a job in one piece, built by transformers or the script.

transformers itself reads saved weights. Values that a job draws from its seed are copied from Oobleck's own model, as
nothing else can draw them: they are equal by definition, and only the training differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.job import JobSpec
from oobleck.training import model as models
from oobleck.training.assembly import Assembly
from oobleck.training.fetched import model_directory
from oobleck.training.randomness import building_alike


class ListedLayers(nn.Module):
    """The layers that a script lists, with their names in checkpoints."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = layers[0]
        self.blocks = nn.ModuleList(layers[1:-1])
        self.head = layers[-1]

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return (self.embedding, *self.blocks, self.head)


def uncut_model(job: JobSpec, assembly: Assembly, made: Mapping[str, Callable[..., Any]]) -> nn.Module:
    """Return the model with its initial values, in training mode. Raises ConfigError if the script cannot build it."""
    dtype = models.Precision.of(job.dtype).parameters
    model: Any
    read: frozenset[str] = frozenset()
    if "model" in made:
        with building_alike(job.seed):
            model = _of_script(made["model"], dtype)
    elif job.model.path is not None:
        model, read = _saved(job, assembly, dtype)
    else:
        model = models.build_model(assembly.structure.config, task=assembly.structure.task, dtype=dtype)
    if assembly.structure.adapters is not None and "model" not in made:
        models.add_adapters(model, assembly.structure.adapters)
    # A script's model that comes with weights has all its values already.
    if "model" not in made or assembly.structure.weights is None:
        _copy_drawn(job, assembly, model, read)
    if job.attn_implementation is not None:
        models.use_attention(model, job.attn_implementation)
    model.train()
    whole: nn.Module = model
    return whole


def _of_script(make: Callable[[], object], dtype: torch.dtype) -> Any:
    try:
        with models.default_dtype(dtype):
            built = models.unwrapped(make())
    # The user's code may fail in any way.
    except Exception as error:
        raise ConfigError(f"the script's model cannot be built: {type(error).__name__}: {error}") from error
    return built if isinstance(built, PreTrainedModel) else ListedLayers(built)


def _saved(job: JobSpec, assembly: Assembly, dtype: torch.dtype) -> tuple[Any, frozenset[str]]:
    """Return a saved model, and the names of the parameters in its files."""
    loaded: Any = models.auto_class(assembly.structure.task).from_pretrained(
        model_directory(job.model.path or "", "model.path"),
        config=assembly.structure.config,
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
    )
    model, report = loaded
    missing = set(report["missing_keys"])
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return model, frozenset(names - missing)


def _copy_drawn(job: JobSpec, assembly: Assembly, model: nn.Module, read: frozenset[str]) -> None:
    """Set parameters that are in no file to the values that Oobleck draws for them."""
    structure = assembly.structure
    stage = models.StageModel(structure, dtype=models.Precision.of(job.dtype).parameters, device="cpu")
    stage.adopt(0, structure.num_layers, {})
    stage.initialize(range(structure.num_layers), seed=job.seed)
    drawn = stage.parameters
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in drawn and models.plain_name(name) not in read:
                parameter.copy_(drawn[name])
