"""Converts whole states, optimizer included, to and from directories of `torch.distributed.checkpoint` (DCP).

Names are those of `torch.distributed.checkpoint.state_dict.get_state_dict`, under the keys that scripts usually give:
`model.NAME`, `optimizer.state.NAME.KIND`, and `step`.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from oobleck.errors import ConfigError, CorruptCheckpoint
from oobleck.job import ModelSpec
from oobleck.training import model as models
from oobleck.training.optim import MISSED

from .imported import write_checkpoint
from .weights import read_state

_METADATA = ".metadata"
_MODEL, _STATE, _STEP = "model.", "optimizer.state.", "step"
_TRIAL_LENGTH = 16
_CLASSES = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
}
"""What a directory's pickled metadata may name: by module, some or all of its names."""


def export_state(checkpoint: Path, target: Path) -> None:
    """Write a checkpoint's weights and optimizer state as a directory of DCP's. Raises CorruptCheckpoint or OSError.

    Verifies every file first. A parameter's `step` counts the steps in which it had a gradient, as torch's does.
    """
    manifest, metadata, weights, states = read_state(checkpoint)
    state: dict[str, torch.Tensor] = {f"{_MODEL}{name}": tensor for name, tensor in weights.items()}
    for alias, home in json.loads(metadata["tied"]).items():
        state[f"{_MODEL}{alias}"] = weights[home]
    for name, kinds in states.items():
        missed = int(kinds.get(MISSED, torch.zeros(())))
        kept = {kind: tensor for kind, tensor in kinds.items() if kind != MISSED}
        for kind, tensor in (kept | {_STEP: torch.tensor(float(manifest.step - missed))}).items():
            state[f"{_STATE}{name}.{kind}"] = tensor
    state[_STEP] = torch.tensor(manifest.step)
    with _alone():
        save(state, checkpoint_id=target)


def import_state(source: Path, target: Path, *, model: str) -> Path:
    """Write a directory of DCP's as a checkpoint, and return its path.

    `model` is a model directory or a name of the hub, whose configuration says which parameters there are. Nothing of
    `source` is unpickled but DCP's own classes. Raises ConfigError, CorruptCheckpoint or OSError.
    """
    structure = models.ModelStructure.from_spec(ModelSpec(path=model), vocab_size=1, sequence_length=_TRIAL_LENGTH)
    saved = _load(source)
    weights = {name.removeprefix(_MODEL): tensor for name, tensor in saved.items() if name.startswith(_MODEL)}
    for name, shape in structure.shapes.items():
        if name not in weights or weights[name].shape != shape:
            found = list(weights[name].shape) if name in weights else "nothing"
            raise ConfigError(
                f"{source}: {_MODEL}{name} should have the shape {list(shape)}, as in {model}; there is {found}"
            )
    if unknown := sorted(weights.keys() - structure.shapes.keys() - structure.anatomy.tied.keys()):
        raise ConfigError(f"{source}: {_MODEL}{unknown[0]} is no parameter of the model in {model}")
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in saved.items():
        if name.startswith(_STATE):
            parameter, _, kind = name.removeprefix(_STATE).rpartition(".")
            states.setdefault(parameter, {})[kind] = tensor
    counts = [int(kinds[_STEP]) for kinds in states.values() if _STEP in kinds]
    step = int(saved[_STEP]) if _STEP in saved else max(counts, default=0)
    if max(counts, default=0) > step:
        raise ConfigError(f"{source}: it is of step {step}, and its optimizer has taken {max(counts)} steps")
    trained = {name: _kept(states.get(name, {}), step=step) for name in weights if states}
    by_tensor = {id(weights[name]): kinds for name, kinds in trained.items()}
    return write_checkpoint(target, structure, weights, by_tensor, step=step)


def _kept(kinds: Mapping[str, torch.Tensor], *, step: int) -> dict[str, torch.Tensor]:
    """Return a parameter's state as our files have it: with the number of missed steps, not of those taken."""
    taken = int(kinds.get(_STEP, torch.tensor(step if kinds else 0)))
    kept = {kind: tensor for kind, tensor in kinds.items() if kind != _STEP}
    return kept | {MISSED: torch.tensor(float(step - taken))} if taken < step else kept


def _load(source: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a directory by their names."""
    reader = _Reader(source)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise CorruptCheckpoint(f"{source / _METADATA}: {error}") from error
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    if not any(name.startswith(_MODEL) for name in state):
        few = ", ".join(sorted(entries)[:3])
        raise ConfigError(
            f"{source}: it has no {_MODEL}NAME, but {few}, …; save {{'model': …, 'optimizer': …}} as get_state_dict "
            "returns them"
        )
    try:
        with _alone():
            load(state, storage_reader=reader)
    except (CheckpointException, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CorruptCheckpoint(f"{source}: {error}") from error
    return state


class _Reader(FileSystemReader):
    """DCP's reader, whose metadata cannot name other classes than DCP's."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / _METADATA).open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it is of {type(found).__name__}, and not DCP's metadata")
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        names = _CLASSES.get(module_name, ())
        if names is None or global_name in names:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which is not DCP's")


@contextmanager
def _alone() -> Iterator[None]:
    """Silence DCP's warning that there are no other processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
