"""Counts the steps of a run and orders their samples as transformers' own loop does."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oobleck.errors import ConfigError
from oobleck.training.randomness import derive_seed, drawing_alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """The steps of an epoch. The last step of each may have fewer samples than others."""

    num_batches: int
    """Batches of an epoch."""
    batches_per_step: int
    """The number of batches whose gradients are accumulated."""

    @property
    def num_steps(self) -> int:
        return max(1, math.ceil(self.num_batches / self.batches_per_step))

    def max_steps(self, *, max_steps: int, num_epochs: float) -> int:
        """Return the steps of a run: `max_steps` if it is positive, else those of `num_epochs`."""
        return max_steps if max_steps > 0 else math.ceil(num_epochs * self.num_steps)

    def num_epochs(self, max_steps: int) -> int:
        """Return how many epochs a run has, the last one perhaps in part."""
        return math.ceil(max_steps / self.num_steps)

    def is_last(self, step: int) -> bool:
        """Return whether an epoch ends with a step."""
        return self.epoch_of(step)[1] + 1 == self.num_steps

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return a step's epoch, from 0, and its number in the epoch, from 0. Steps count from 1."""
        return divmod(step - 1, self.num_steps)

    def progress(self, step: int) -> float:
        """Return the number of epochs that are done after a step, as in `TrainerState.epoch`."""
        epoch, within = self.epoch_of(step)
        return epoch + min(1.0, (within + 1) * self.batches_per_step / self.num_batches)


class EpochOrder:
    """The samples of each step, in batches as by transformers' loader. Keeps one epoch's order, 8 bytes a sample."""

    def __init__(self, loader: Any, epochs: Epochs, *, seed: int, batch_size: int | None = None) -> None:
        """`loader` is the result of `Trainer.get_train_dataloader`; a batch of more than `batch_size` is an error."""
        self._loader = loader
        self._batch_size = batch_size
        self._epochs = epochs
        self._seed = seed
        own = [] if _reseeds(loader.batch_sampler) else list(_generators_of(loader.batch_sampler))
        self._own = tuple(own)
        self._states = [[each.get_state() for each in own]]
        """Those of its own generators before each epoch, as the script's own loop would have them."""
        self._kept: tuple[int, npt.NDArray[np.int64], Sequence[int]] | None = None

    def __call__(self, step: int) -> tuple[int, ...]:
        """Return the numbers of a step's samples, in their order. O(samples of an epoch) for an epoch's first step."""
        epoch, within = self._epochs.epoch_of(step)
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, *self._batches_of(epoch))
        _, numbers, starts = self._kept
        first = within * self._epochs.batches_per_step
        stop = min(first + self._epochs.batches_per_step, len(starts) - 1)
        return tuple(numbers[starts[first] : starts[stop]].tolist())

    def batches(self, step: int) -> list[tuple[int, ...]]:
        """Return the numbers of a step's samples in the loader's batches."""
        first = self._epochs.epoch_of(step)[1] * self._epochs.batches_per_step
        self(step)
        assert self._kept is not None
        _, numbers, starts = self._kept
        bounds = starts[first : first + self._epochs.batches_per_step + 1]
        return [tuple(numbers[start:stop].tolist()) for start, stop in pairwise(bounds)]

    def epoch_of(self, step: int) -> tuple[int, int]:
        return self._epochs.epoch_of(step)

    def first_step(self, epoch: int) -> int:
        return 1 + epoch * self._epochs.num_steps

    def digest(self, epoch: int) -> str:
        """Digest the order of an epoch's samples. O(samples of an epoch), unless it was the last one asked for."""
        self(self.first_step(epoch))
        assert self._kept is not None
        _, numbers, starts = self._kept
        return hashlib.blake2b(numbers.tobytes() + repr(starts).encode(), digest_size=8).hexdigest()

    def check(self) -> None:
        """Draw the first epoch twice. Raises ConfigError for a sampler whose order depends on earlier draws."""
        (numbers, starts), (again, starts_again) = self._batches_of(0), self._batches_of(0)
        if starts != starts_again or not np.array_equal(numbers, again):
            sampler = getattr(self._loader.batch_sampler, "sampler", self._loader.batch_sampler)
            raise ConfigError(
                f"Trainer: the sampler {type(sampler).__name__} gives another order each time that it draws the same "
                "epoch, so workers would take different samples; have its __iter__ draw from torch, random or "
                "numpy, or follow from set_epoch(epoch)"
            )

    def _check_size(self, count: int) -> None:
        if self._batch_size is not None and count > self._batch_size:
            raise ConfigError(
                f"Trainer: {type(self._loader.batch_sampler).__name__} draws a batch of {count} samples, and its "
                f"batch_size is {self._batch_size}; have its batch_size name the largest batch"
            )

    def _batches_of(self, epoch: int) -> tuple[npt.NDArray[np.int64], Sequence[int]]:
        """Return an epoch's samples, and the position in them where each batch begins, and the last one ends."""
        while len(self._states) <= epoch and self._own:
            self._draw(len(self._states) - 1)
        return self._draw(epoch)

    def _draw(self, epoch: int) -> tuple[npt.NDArray[np.int64], Sequence[int]]:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        batches: Iterable[Sequence[int]] = self._loader.batch_sampler
        starts, numbers = [0], []
        # A sampler must draw from the run's seed and the epoch alone: workers have run different layers, and a newcomer
        # has seen no earlier epoch. A sampler's own generator goes on from epoch to epoch, from where the script left
        # it; transformers' samplers seed themselves.
        with drawing_alike(derive_seed(self._seed, "order", epoch), beside=self._own):
            for generator, state in zip(self._own, self._states[epoch] if self._own else (), strict=True):
                generator.set_state(state)
            if (of_loader := getattr(self._loader, "generator", None)) is not None and of_loader in self._own:
                torch.empty((), dtype=torch.int64).random_(generator=of_loader)  # as torch's loader before an epoch
            for batch in batches:
                self._check_size(len(batch))
                numbers.append(np.asarray(batch, dtype=np.int64))
                starts.append(starts[-1] + len(batch))
            if len(self._states) == epoch + 1:
                self._states.append([each.get_state() for each in self._own])
        return np.concatenate(numbers), starts


def _reseeds(sampler: Any) -> bool:
    # Accelerate's, which transformers has in place of torch's own, seeds its generator by the epoch.
    return type(getattr(sampler, "sampler", None)).__name__ == "SeedableRandomSampler"


def _generators_of(sampler: Any) -> Iterator[torch.Generator]:
    """Yield the generators among the attributes of a sampler and of its inner samplers."""
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            yield value
        elif isinstance(value, torch.utils.data.Sampler):
            yield from _generators_of(value)
