"""Samples that a Trainer's dataset yields one after the other, by number, and the steps that they fall into.

A sample's number counts those before it, over all epochs. Each worker iterates over all samples and keeps the latest.
So a stream must yield the same ones each time: a run that resumes, or goes back, iterates again from the epoch's
beginning.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, has_length

from oobleck.errors import ConfigError
from oobleck.training.data import numbers_in
from oobleck.training.randomness import drawing_alike

from .epochs import Epochs

_PLACE = "Trainer(train_dataset=…)"
_TRIED = 64
_LEAST_KEPT, _STEPS_KEPT = 4096, 96


def is_stream(dataset: Any) -> bool:
    # A stream may have a length, and still no samples by number.
    return isinstance(dataset, torch.utils.data.IterableDataset)


class NumberedStream:
    """A stream's samples by number. Its length is that of its beginning, on which collators and models are tried."""

    def __init__(self, loader: Any, *, samples_per_step: int) -> None:
        """`loader` is the result of `Trainer.get_train_dataloader`. Raises ConfigError for one without samples."""
        self._loader = loader
        self.num_kept = max(_LEAST_KEPT, _STEPS_KEPT * samples_per_step)
        """The most samples that are kept."""
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._items: Iterator[Any] = iter(())
        self._next, self._epoch = 0, -1
        self.first_of = [0]
        """The number of each known epoch's first sample."""
        self._num_tried = sum(self.has(number, 0) for number in range(_TRIED))
        if not self._num_tried:
            raise ConfigError(f"{_PLACE}: it has no samples")

    def __len__(self) -> int:
        return self._num_tried

    def __getitem__(self, number: int) -> Any:
        """Return a sample that exists. Raises ConfigError where the stream has ended earlier than before."""
        with self._lock:
            epoch = bisect_right(self.first_of, number) - 1
            if not self._reach(number, epoch):
                raise ConfigError(f"{_PLACE}: it has ended before sample {number}, which it had before")
            return self._kept[number]

    def has(self, number: int, epoch: int) -> bool:
        """Return whether a number is of an epoch, rather than of one after it."""
        with self._lock:
            return self._reach(number, epoch)

    def check(self) -> None:
        """Read the first samples twice. Raises ConfigError for others, which workers could not read alike."""
        found = []
        for seed in range(2):
            self._loader.set_epoch(0)
            with drawing_alike(seed):
                found.append([numbers_in(item) for item in islice(iter(self._loader.dataset), _TRIED)])
        if found[0] != found[1]:
            raise ConfigError(
                f"{_PLACE}: {type(self._loader.dataset).__name__} yields other samples each time, so workers would "
                "take different ones; have it draw from a generator that it seeds when it begins, by the epoch of "
                "set_epoch(epoch), and go on from no earlier pass"
            )

    def _reach(self, number: int, epoch: int) -> bool:
        if epoch + 1 < len(self.first_of) and number >= self.first_of[epoch + 1]:
            return False
        if number in self._kept:
            return True
        if epoch != self._epoch or number < self._next:
            self._begin(epoch)
        for item in self._items:
            self._kept[self._next] = item
            self._kept.move_to_end(self._next)
            self._next += 1
            if len(self._kept) > self.num_kept:
                self._kept.popitem(last=False)
            if self._next > number:
                return True
        if epoch + 1 == len(self.first_of) and self._next > self.first_of[epoch]:
            self.first_of.append(self._next)
        return False

    def _begin(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)
        self._items, self._epoch, self._next = iter(self._loader.dataset), epoch, self.first_of[epoch]


class StreamOrder:
    """The samples of each step: batches in the stream's order, the last one of an epoch with what is left."""

    def __init__(self, stream: NumberedStream, *, batch_size: int, batches_per_step: int) -> None:
        self._stream = stream
        self._batch_size = batch_size
        self._size = batch_size * batches_per_step
        self._first_steps = [1]

    def __call__(self, step: int) -> tuple[int, ...]:
        """Return the numbers of a step's samples. Iterates over the stream as far as that."""
        epoch, within = self.epoch_of(step)
        start = self._stream.first_of[epoch] + within * self._size
        return tuple(number for number in range(start, start + self._size) if self._stream.has(number, epoch))

    def batches(self, step: int) -> list[tuple[int, ...]]:
        """Return the numbers of a step's samples in the loader's batches."""
        numbers = self(step)
        return [numbers[start : start + self._batch_size] for start in range(0, len(numbers), self._batch_size)]

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return a step's epoch and its number in it, from 0. Raises ConfigError where an epoch has no samples."""
        while True:
            epoch = bisect_right(self._first_steps, step) - 1
            within, first = step - self._first_steps[epoch], self._stream.first_of[epoch]
            if epoch + 1 < len(self._first_steps) or self._stream.has(first + within * self._size, epoch):
                return epoch, within
            if len(self._stream.first_of) == epoch + 1:
                raise ConfigError(f"{_PLACE}: it yields no samples when it is iterated again; lower max_steps")
            length = self._stream.first_of[epoch + 1] - first
            self._first_steps.append(self._first_steps[epoch] - (-length // self._size))

    def first_step(self, epoch: int) -> int:
        return self._first_steps[epoch]

    def digest(self, epoch: int) -> str:
        return f"stream {epoch} {self._size}"

    def check(self) -> None:
        self._stream.check()


@dataclass(frozen=True, slots=True)
class StreamLoader:
    """A stream in the place of a trainer's loader."""

    dataset: NumberedStream
    collate_fn: Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEpochs(Epochs):
    """Epochs of unknown length, which transformers takes for as long as the run, unless the stream has a length."""

    order: StreamOrder
    has_length: bool

    def num_epochs(self, max_steps: int) -> int:
        """Return what transformers does: without a length, as many as it takes."""
        return super(StreamEpochs, self).num_epochs(max_steps) if self.has_length else sys.maxsize

    def epoch_of(self, step: int) -> tuple[int, int]:
        return self.order.epoch_of(step)

    def is_last(self, step: int) -> bool:
        return self.epoch_of(step + 1)[1] == 0


def opened_stream(loader: Any, args: TrainingArguments, size: int) -> tuple[StreamLoader, StreamEpochs]:
    """Return the samples and the epochs of a loader over a stream, with batches of a size.

    Raises ConfigError for arguments by which transformers would read or count another way.
    """
    if args.dataloader_num_workers > 1:
        raise ConfigError(
            f"TrainingArguments(dataloader_num_workers={args.dataloader_num_workers}): each would iterate over the "
            "stream of train_dataset, in an order of their own; leave it out"
        )
    accumulated, num_batches = args.gradient_accumulation_steps, len(loader) if has_length(loader) else None
    for name in ("eval_strategy", "save_strategy"):
        if num_batches is None and getattr(args, name) == IntervalStrategy.EPOCH:
            raise ConfigError(
                f"TrainingArguments({name}='epoch'): the stream of train_dataset has no length; give it in steps"
            )
    stream = NumberedStream(loader, samples_per_step=size * accumulated)
    order = StreamOrder(stream, batch_size=size, batches_per_step=accumulated)
    has_batches = num_batches is not None
    num_batches = args.max_steps * accumulated if num_batches is None else num_batches
    return StreamLoader(stream, loader.collate_fn), StreamEpochs(
        num_batches=num_batches, batches_per_step=accumulated, order=order, has_length=has_batches
    )
