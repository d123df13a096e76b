"""The weights with the best evaluation, kept beside the checkpoints of their run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from oobleck.errors import CorruptCheckpoint
from oobleck.host.writing import write_whole
from oobleck.training.checkpoint import gathered_weights

_METRIC = "metric.json"


class BestCheckpoint:
    def __init__(self, checkpoints: Path, *, begins_from: Path | None = None) -> None:
        """`checkpoints` is the directory of a run's checkpoints on this machine.

        `begins_from` is the checkpoint from which the script wants the run to begin, if it names one.
        """
        self._begins_from = begins_from and str(begins_from)
        self._directory = checkpoints.with_name(f"{checkpoints.name}-best")
        self._kept: str | None = None
        self._problem = ""

    def forget(self) -> None:
        """Remove what an earlier run has kept."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._kept = None

    def restore(self) -> tuple[float, int] | None:
        """Return the metric and the step of the weights that an earlier part of this run has kept.

        Removes those of a run that did not begin from the checkpoint that the script names.
        """
        try:
            kept = json.loads((self._directory / _METRIC).read_text(encoding="utf-8"))
            if self._begins_from is not None and kept["begins_from"] != self._begins_from:
                self.forget()
                return None
            self._kept = str(kept["name"])
            return float(kept["metric"]), int(kept["step"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def keep(self, weights: Path, step: int, metric: float) -> None:
        """Move gathered weights here, in place of those kept before."""
        kept, before = self._directory / weights.name, self._kept
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(kept, ignore_errors=True)  # the run may have gone back
            weights.rename(kept)
            noted = {"metric": metric, "step": step, "name": kept.name, "begins_from": self._begins_from}
            write_whole(self._directory / _METRIC, json.dumps(noted))
        except OSError as error:
            self._problem = f"{weights}, the best weights, cannot be kept: {error}"
            return
        self._kept, self._problem = kept.name, ""
        if before not in (None, kept.name):
            shutil.rmtree(self._directory / str(before), ignore_errors=True)

    @property
    def path(self) -> str | None:
        return None if self._kept is None else str(self._directory / self._kept)

    def weights(self) -> dict[str, torch.Tensor] | None:
        """Return the kept weights; None if none were. Raises CorruptCheckpoint."""
        if self._problem:
            raise CorruptCheckpoint(self._problem)
        return None if self.path is None else gathered_weights(Path(self.path))
