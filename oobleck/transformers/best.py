"""The checkpoint with the best evaluation, kept beside the checkpoints of its run, which removes old ones."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path

import torch

from oobleck.errors import CorruptCheckpoint
from oobleck.host.writing import write_whole
from oobleck.training.checkpoint import weights_of

_MOST_KNOWN = 64
_METRIC = "metric.json"


class BestCheckpoint:
    """Keeps a checkpoint by hard links, so that it costs no time and, while the run has it too, no room."""

    def __init__(self, checkpoints: Path) -> None:
        """`checkpoints` is the directory of a run's checkpoints on this machine."""
        self._checkpoints = checkpoints
        self._directory = checkpoints.with_name(f"{checkpoints.name}-best")
        self._names: OrderedDict[int, str] = OrderedDict()
        """The newest checkpoints, keyed by step."""
        self._kept: str | None = None
        self._problem = ""

    def forget(self) -> None:
        """Remove what an earlier run has kept."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def restore(self) -> tuple[float, int] | None:
        """Return the metric and the step of the checkpoint that an earlier part of this run has kept."""
        try:
            kept = json.loads((self._directory / _METRIC).read_text(encoding="utf-8"))
            self._kept = str(kept["name"])
            return float(kept["metric"]), int(kept["step"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def note_saved(self, step: int, name: str) -> None:
        self._names[step] = name
        while len(self._names) > _MOST_KNOWN:
            self._names.popitem(last=False)

    def keep(self, step: int | None, metric: float | None) -> None:
        """Keep the checkpoint of a step, if there is one yet, in place of that kept before."""
        if step is None or (name := self._names.get(step)) is None or name == self._kept:
            return
        try:
            shutil.copytree(self._checkpoints / name, self._directory / name, copy_function=_link, dirs_exist_ok=True)
            write_whole(self._directory / _METRIC, json.dumps({"metric": metric, "step": step, "name": name}))
        except OSError as error:
            self._problem = f"{self._checkpoints / name}, the best checkpoint, cannot be kept: {error}"
            return
        if self._kept is not None:
            shutil.rmtree(self._directory / self._kept, ignore_errors=True)
        self._kept, self._problem = name, ""

    @property
    def path(self) -> str | None:
        return None if self._kept is None else str(self._directory / self._kept)

    def weights(self) -> dict[str, torch.Tensor] | None:
        """Return the weights of the kept checkpoint; None if none was. Raises CorruptCheckpoint."""
        if self._problem:
            raise CorruptCheckpoint(self._problem)
        return None if self._kept is None else weights_of(self._directory, self._kept)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # the disk has no links
        shutil.copy2(source, target)
    return target
