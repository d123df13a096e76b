"""Samples that a job's script yields one after the other, in unknown number: one shard, read by position.

A record's position is the number of records before it. So the master can assign records to steps, as with any shard,
and each worker reads its own. This requires the script to yield the same records in the same order, every time and on
every worker. A worker iterates over all of them, and keeps those that it may have to read.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from oobleck.errors import ConfigError, ShardUnreadable
from oobleck.host.script import SCRIPT_STREAM

from .records import NO_SAMPLE, Records
from .samples import ModelInputs, Sample, ignored
from .script_data import check_alone, numbers_in, read_item
from .shard_reader import Extent

_PLACE = "the script's data"
# Samples read at the start, to check that they fit the model, and are the same on all nodes.
_CHECKED_SAMPLES = 4
# A survey reports after this time, since a slow source must not look like a worker that does not answer.
_SURVEY_S = 2.0


class ScriptStream:
    """All samples by position. Another thread may call `survey`."""

    names = (SCRIPT_STREAM,)
    mask_id = None
    num_samples = 0  # known beforehand

    def __init__(self, make: Callable[[], Any], *, sequence_length: int, vocab_size: int, num_kept: int) -> None:
        """`make` returns a new iterable each time; `num_kept` samples stay in memory. Raises ConfigError if empty."""
        self.records = Records()
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self._make = make
        self._num_kept = num_kept
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._items: Iterator[Any] | None = None
        self._next = 0  # the position of the next of `_items`
        self._end: int | None = None  # the number of samples, once known
        self.digest = self._digest_of_first()

    def reopened(self) -> ScriptStream:
        # A second stream would have to iterate over all samples again.
        return self

    def survey(self, shard: int, start: int, limit: int) -> Extent:
        """See `ShardReader`. Raises ShardUnreadable."""
        bounds = [start]
        until_s = time.monotonic() + _SURVEY_S
        while len(bounds) <= limit and (len(bounds) == 1 or time.monotonic() < until_s):
            try:
                is_there = self._has(bounds[-1])
            except ShardUnreadable as error:
                # The records before it are reported first.
                if len(bounds) == 1:
                    raise error.of(shard, start) from error
                break
            if not is_there:
                return Extent(bounds=tuple(bounds), is_end=True)
            bounds.append(bounds[-1] + 1)
        return Extent(bounds=tuple(bounds))

    def sample(self, number: int, inputs: ModelInputs) -> Sample:
        """Return the step's record by number; for `NO_SAMPLE`, one with ignored labels.

        Raises ShardUnreadable, or ConfigError for a record that does not fit the model.
        """
        if number == NO_SAMPLE:
            return ignored(self.sample(self.records.first, inputs), inputs)
        location = self.records.locate(number)
        try:
            return self._read(location.start, inputs)
        except ShardUnreadable as error:
            raise error.of(location.shard, location.start) from error

    def check(self, inputs: ModelInputs) -> None:
        """Read the first samples. Raises ConfigError if one does not fit the model."""
        for position in range(_CHECKED_SAMPLES):
            if self._has(position):
                sample = self._read(position, inputs)
                check_alone(sample, inputs, place=f"{_PLACE}: sample {position}", length=self.sequence_length)

    def _read(self, position: int, inputs: ModelInputs) -> Sample:
        with self._lock:
            if not self._reach(position):
                problem = f"it has ended before sample {position}, which it had before; it must give the same"
                raise ShardUnreadable(problem)
            item = self._kept[position]
        place = f"{_PLACE}: sample {position}"
        return read_item(item, inputs, place=place, length=self.sequence_length, vocab_size=self.vocab_size)

    def _has(self, position: int) -> bool:
        with self._lock:
            return self._reach(position)

    def _reach(self, position: int) -> bool:
        """Iterate up to a position, so that its sample is kept. Returns False if there is none."""
        if position in self._kept:
            return True
        if self._end is not None and position >= self._end:
            return False
        if self._items is None or position < self._next:
            self._begin_again(position)
        while self._next <= position:
            if not self._take_next():
                return False
        return True

    def _begin_again(self, position: int) -> None:
        """Iterate from a position if the source can skip records, or from the beginning."""
        try:
            made = self._make()
            skips = position if type(made).__module__.partition(".")[0] == "datasets" and hasattr(made, "skip") else 0
            self._items = iter(made.skip(skips) if skips else made)
            self._next = skips
        # It is the user's code, and may fail in any way.
        except Exception as error:
            self._items = None
            raise ShardUnreadable(f"{_PLACE}: {type(error).__name__}: {error}") from error

    def _take_next(self) -> bool:
        assert self._items is not None
        try:
            item = next(self._items)
        except StopIteration:
            self._items, self._end = None, self._next
            return False
        # As above. An iterator that has failed cannot be continued.
        except Exception as error:
            self._items = None
            raise ShardUnreadable(f"{_PLACE}: sample {self._next}: {type(error).__name__}: {error}") from error
        self._kept[self._next] = item
        # After a new beginning it may be here already, in a place from which it would be dropped next.
        self._kept.move_to_end(self._next)
        self._next += 1
        if len(self._kept) > self._num_kept:
            self._kept.popitem(last=False)
        return True

    def _digest_of_first(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        try:
            for position in range(_CHECKED_SAMPLES):
                if not self._has(position):
                    break
                digest.update(numbers_in(self._kept[position]))
        except ShardUnreadable as error:
            raise ConfigError(error.problem) from error
        if not self._kept:
            raise ConfigError(f"{_PLACE}: it has no samples")
        return digest.hexdigest()
