"""The weights of a moment of training, in the script's model: read from what the nodes have gathered or saved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oobleck.errors import CorruptCheckpoint
from oobleck.training.checkpoint import gathered_in, gathered_weights
from oobleck.training.model import unwrapped


class GatheredWeights:
    """Says whether a model has the weights of the moment, and reads them where they are asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrapped(model)
        self._checkpoints: Path | None = None
        self._source: Path | None = None
        """The directory of the moment's weights; None where the nodes alone have them."""
        self.are_here = True

    def look_in(self, checkpoints: Path) -> None:
        """Say where the run's checkpoints are; removes what an earlier run has gathered."""
        self._checkpoints = checkpoints
        shutil.rmtree(gathered_in(checkpoints, 0).parent, ignore_errors=True)

    def are_gone(self) -> None:
        """Note that training has changed the weights."""
        self._source, self.are_here = None, False

    @contextmanager
    def gathered(self, step: int) -> Iterator[Path | None]:
        """Within the block, the moment's weights are those that workers have gathered at a step, in the directory."""
        if self._checkpoints is None:
            yield None
            return
        self._source, self.are_here = gathered_in(self._checkpoints, step), False
        try:
            yield self._source
        finally:
            shutil.rmtree(self._source, ignore_errors=True)
            self._source = None

    @contextmanager
    def saved(self, name: str) -> Iterator[None]:
        """Within the block, the moment's weights are those of a checkpoint."""
        before = self.are_here
        self.are_here = False
        self._source = None if self._checkpoints is None else self._checkpoints / name
        try:
            yield
        finally:
            self._source, self.are_here = None, before and not self.are_here

    def fetch(self) -> bool:
        """Put the weights of the moment into the model; returns whether they could be. Raises CorruptCheckpoint."""
        if not self.are_here and self._source is not None and self._source.exists():
            fitting = fitted(self._model, gathered_weights(self._source), self._source)
            self.are_here = True  # from here on, uses of parameters are allowed
            for tensor, weights in fitting:
                tensor.data.copy_(weights)  # of `data`, as it is no change of a callback's
        return self.are_here


def fitted(
    model: nn.Module, weights: Mapping[str, torch.Tensor], place: Path
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each of a model's tensors with its new values. Raises CorruptCheckpoint unless all have some."""
    known = model.state_dict(keep_vars=True)
    # By identity, since a tied tensor has several names, of which the file has one.
    loaded = {id(known[name]) for name in weights if name in known}
    absent = {name for name, tensor in known.items() if id(tensor) not in loaded}
    if absent or (unexpected := weights.keys() - known.keys()):
        raise CorruptCheckpoint(f"{place}: its parameters are not the model's: {sorted(absent or unexpected)}")
    return [(known[name], values) for name, values in weights.items()]


def evaluate(trainer: Any, ignore_keys: list[str] | None) -> dict[str, float]:
    """Evaluate the weights in a trainer's model as transformers does while it trains, and return the metrics."""
    modes = {module: module.training for module in trainer.model.modules()}
    try:
        metrics: dict[str, float] = trainer.evaluate(ignore_keys=ignore_keys)
        return metrics
    finally:
        for module, mode in modes.items():
            module.training = mode
