"""Reads a program's microbatches in their order, and copies them to the device, each while the one before is computed.

A thread reads, unless the samples come from a script and the model may draw random numbers: what a script draws is
seeded in the generators of the whole process, which the model's draws would change, and be changed by.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from oobleck.errors import ConfigError
from oobleck.training.comm import CopyStreams, start_thread
from oobleck.training.data import Batch, Dataset
from oobleck.training.model import StageModel

_log = logging.getLogger(__name__)

_LIBRARIES = frozenset({"torch", "transformers", "peft", "oobleck"})


@dataclass(frozen=True, slots=True)
class Read:
    """A microbatch on its way to the device."""

    batch: Batch
    streams: CopyStreams | None
    copied: Any
    """An event at the end of the copy."""

    def join(self) -> Batch:
        """Return it for this thread's next launches."""
        if self.streams is not None:
            for tensor in self.batch.tensors:
                self.streams.join(self.copied, tensor)
        return self.batch


class BatchReader:
    """Lasts as long as a step's data: one for all programs of a worker."""

    def __init__(self, dataset: Dataset, model: StageModel) -> None:
        self._device = model.device
        self._streams = CopyStreams.on(model.device)
        self._may_read_ahead = not dataset.runs_script or not may_draw(model)

    def begin(self, load: Callable[[int], Batch], microbatches: Sequence[int]) -> Reading:
        """Begin to read microbatches by `load`, in this order. The caller must call `close`."""
        return Reading(self, load, microbatches if self._may_read_ahead and len(microbatches) > 1 else ())

    def read(self, load: Callable[[int], Batch], microbatch: int) -> Read:
        batch = load(microbatch)
        if self._streams is None:
            return Read(batch.to(self._device), None, None)
        streams, rooms = self._streams, dict[int, torch.Tensor]()
        copied: Any = None
        for tensor in batch.tensors:
            # Pinned memory comes from torch's cache, which keeps it until the copy is done: a ring of a few buffers.
            rooms[id(tensor)] = streams.room(tuple(tensor.shape), tensor.dtype)
            # torch pins no tensor whose elements share memory, such as one row of positions for all samples.
            copied = streams.copy_in(tensor.contiguous().pin_memory(), rooms[id(tensor)])
        return Read(batch.mapped(lambda tensor: rooms[id(tensor)]), streams, copied)

    @property
    def device(self) -> torch.device:
        return self._device

    def stop_reading_ahead(self, error: BaseException) -> None:
        _log.warning("samples are read by the training thread alone from now on, since another one cannot: %s", error)
        self._may_read_ahead = False


class Reading:
    """The microbatches of one program."""

    def __init__(self, reader: BatchReader, load: Callable[[int], Batch], ahead: Sequence[int]) -> None:
        self._reader = reader
        self._load = load
        self._ahead = list(ahead)
        self._is_over = False
        self._is_wanted = threading.Semaphore(1)  # one microbatch at a time is read and not taken
        self._outcomes: SimpleQueue[Read | BaseException] = SimpleQueue()
        self._has_ended = threading.Event()
        if not self._ahead:
            self._has_ended.set()
            return
        context = copy_context()  # numpy's error handling, among others, belongs to it
        start_thread(lambda: context.run(self._run, tuple(ahead)), name="read ahead", device=reader.device)

    def take(self, microbatch: int) -> Batch:
        """Return a microbatch on the device. Raises what reading it raises."""
        if not self._ahead:
            return self._reader.read(self._load, microbatch).join()
        assert self._ahead.pop(0) == microbatch, "microbatches are taken in the order in which they are read"
        outcome = self._outcomes.get()
        if isinstance(outcome, ConfigError):
            # A script's object may belong to the thread that made it, as SQLite's connections do. If not, this raises
            # the same error where a script expects it.
            self._ahead.clear()
            read = self._reader.read(self._load, microbatch)
            self._reader.stop_reading_ahead(outcome)
            return read.join()
        if isinstance(outcome, BaseException):
            raise outcome
        self._is_wanted.release()
        return outcome.join()

    def close(self) -> None:
        """Stop reading, and wait for a read that is under way: nothing else may read, or draw, meanwhile."""
        self._is_over = True
        self._is_wanted.release()
        self._has_ended.wait()

    def _run(self, microbatches: Sequence[int]) -> None:
        try:
            for microbatch in microbatches:
                self._is_wanted.acquire()
                if self._is_over:
                    return
                self._outcomes.put(self._reader.read(self._load, microbatch))
        except BaseException as error:  # noqa: BLE001  handed to the thread that takes
            self._outcomes.put(error)
        finally:
            self._has_ended.set()


def may_draw(model: StageModel) -> bool:
    """Return whether a pass, or a script's code in it, may draw from the process's generators."""
    structure = model.structure
    if structure.draws_at_random or structure.compute_loss is not None or structure.hooks:
        return True
    return any(type(module).__module__.partition(".")[0] not in _LIBRARIES for module in model.model.modules())
