"""Converts a checkpoint of transformers' Trainer into one of Oobleck, and the optimizer's state in one back."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError, CorruptCheckpoint
from oobleck.training.flow import Flow
from oobleck.training.model import LiveModel, LossOfInputs, ModelStructure
from oobleck.training.optim import MISSED

from .imported import write_checkpoint
from .weights import read_state

_STATE, _OPTIMIZER = "trainer_state.json", "optimizer.pt"
_OURS = "oobleck"
_STEP = "step"
_TRIAL_LENGTH = 8
_WAYS_TO_COMPUTE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of torch's optimizers that change no result."""


def is_trainer_checkpoint(directory: Path) -> bool:
    """Return whether a directory is a checkpoint of transformers' Trainer."""
    return (directory / _STATE).is_file()


def import_trainer_checkpoint(
    directory: Path,
    model: nn.Module,
    decayed: Collection[str],
    options: Sequence[Mapping[str, object]],
    *,
    whole_loss: LossOfInputs | None = None,
    flow: Flow | None = None,
) -> Path:
    """Write a checkpoint of ours next to a Trainer's, and return its path: `DIRECTORY/oobleck/step-…`.

    `model` has the weights already, `decayed` names its decayed parameters, and `options` are those of the optimizer's
    two groups in the job; `whole_loss` is set for a model that computes its own, with its `flow` if it is cut. Raises
    CorruptCheckpoint, OSError, or ConfigError for an optimizer state without transformers' layout or of other options.
    """
    try:
        step = int(json.loads((directory / _STATE).read_text())["global_step"])
        # With `weights_only`, no code in the file runs.
        saved: Any = torch.load(directory / _OPTIMIZER, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.filename}: missing; continue from a checkpoint that was saved without save_only_model"
        ) from error
    except (ValueError, KeyError, RuntimeError, EOFError) as error:
        raise CorruptCheckpoint(f"{directory}: {error}") from error
    _require_same_options(directory, saved, options)
    states = dict(_states(directory, model, decayed, saved, step))
    live = LiveModel.skeleton_of(model, is_whole=whole_loss is not None)
    if whole_loss is None:
        structure = ModelStructure.from_live(live, sequence_length=_TRIAL_LENGTH)
    else:
        structure = ModelStructure.with_its_loss(live, whole_loss, sequence_length=_TRIAL_LENGTH, flow=flow)
    return write_checkpoint(directory / _OURS, structure, model.state_dict(keep_vars=True), states, step=step)


def _require_same_options(directory: Path, saved: Mapping[str, Any], options: Sequence[Mapping[str, object]]) -> None:
    """Raise ConfigError for an option that transformers would take from the checkpoint, and workers from the job."""
    for own, group in zip(options, saved["param_groups"], strict=False):
        for name, value in own.items():
            # A schedule has set `lr` since, and kept where it began.
            kept = group.get("initial_lr", group["lr"]) if name == "lr" else group.get(name, value)
            if name not in _WAYS_TO_COMPUTE and kept != value:
                raise ConfigError(
                    f"{directory / _OPTIMIZER}: it was saved with {name} = {kept!r}, and this script has {value!r}. "
                    "transformers would continue with the saved value; set it in TrainingArguments, or begin a new run "
                    "from the model's weights"
                )


def _states(
    directory: Path, model: nn.Module, decayed: Collection[str], saved: Mapping[str, Any], step: int
) -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
    """Yield the id and the optimizer state of each trained parameter."""
    groups = _groups(model, decayed)
    saved_groups: Sequence[Sequence[int]] = [group["params"] for group in saved["param_groups"]]
    sizes, saved_sizes = [len(group) for group in groups], [len(group) for group in saved_groups]
    if sizes != saved_sizes:
        raise ConfigError(
            f"{directory / _OPTIMIZER}: its groups have {saved_sizes} parameters, and the model's {sizes}; continue "
            "with the model and the optimizer that saved it"
        )
    for group, numbers in zip(groups, saved_groups, strict=True):
        for parameter, number in zip(group, numbers, strict=True):
            state = dict(saved["state"].get(number, {}))
            # Torch makes the state of a parameter with its first gradient, and counts the steps in which it has one.
            taken = int(state.pop("step", step if state else 0))
            if not 0 <= taken <= step or any(value.shape not in ((), parameter.shape) for value in state.values()):
                shapes = [tuple(value.shape) for value in state.values()]
                raise ConfigError(
                    f"{directory / _OPTIMIZER}: the state of parameter {number} is of step {taken} and the shapes "
                    f"{shapes}, not of step {step} and {tuple(parameter.shape)}; continue from a checkpoint of the "
                    "same model"
                )
            if taken < step:
                state[MISSED] = torch.tensor(float(step - taken))
            yield id(parameter), state


def _groups(model: nn.Module, decayed: Collection[str]) -> list[list[nn.Parameter]]:
    """Return the trained parameters in transformers' two groups, in whose order torch numbers their states."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [
        [parameter for name, parameter in trained.items() if (name in decayed) == is_decayed]
        for is_decayed in (True, False)
    ]


def exported_optimizer(
    checkpoint: Path,
    model: nn.Module,
    decayed: Collection[str],
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    options: Sequence[Mapping[str, object]],
) -> torch.optim.Optimizer:
    """Return an optimizer as transformers' Trainer would have it, with the state in a checkpoint of ours.

    `make` makes one of groups; the other arguments are those of `import_trainer_checkpoint`. Raises CorruptCheckpoint,
    and OSError for a checkpoint that has been removed.
    """
    manifest, _, _, states = read_state(checkpoint)
    known = dict(model.named_parameters(remove_duplicate=False))
    of_parameters = {id(known[name]): state for name, state in states.items()}
    probe = nn.Parameter(torch.zeros(1))
    probing = make([{"params": [probe]}])
    probe.grad = torch.zeros(1)
    probing.step()
    groups = _groups(model, decayed)
    optimizer = make([{**own, "params": group} for own, group in zip(options, groups, strict=True)])
    for parameter in (each for group in groups for each in group):
        if (state := of_parameters.get(id(parameter))) is None:
            continue
        taken = manifest.step - int(state.pop(MISSED, torch.zeros(())))
        # What files lack is equal for all parameters; the count of steps is the checkpoint's own.
        equal = {name: value for name, value in probing.state[probe].items() if not isinstance(value, torch.Tensor)}
        if isinstance(counted := probing.state[probe].get(_STEP), torch.Tensor):
            equal[_STEP] = torch.full_like(counted, taken)
        elif counted is not None:
            equal[_STEP] = taken
        optimizer.state[parameter] = {**equal, **state}
    return optimizer
