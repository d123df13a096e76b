"""Looks into shards for the master: which records there are, and where they begin and end.

On a thread of its own, with readers of its own, so that a slow disk or an unreachable stream holds up nothing else.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from oobleck.control.protocol import ScanAnswer, ScanRange, ScanRequest, ScanResult
from oobleck.errors import ShardUnreadable

from .shard_reader import Extent


class SurveyedShards(Protocol):
    """Shards that can be looked into, for one thread."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def survey(self, shard: int, start: int, limit: int) -> Extent:
        """See `ShardReader`. Raises ShardUnreadable."""
        ...


class ShardScanner:
    """One worker's. `ask` is the control thread's to call, and returns at once."""

    def __init__(self, shards: SurveyedShards, device: int, report: Callable[[ScanAnswer], None]) -> None:
        self._shards = shards
        self._device = device
        self._report = report
        self._questions: queue.SimpleQueue[ScanRequest] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="survey").start()

    def ask(self, survey: ScanRequest) -> None:
        """Have a question answered."""
        self._questions.put(survey)

    def _work(self) -> None:
        while True:
            asked = self._questions.get()
            found = _survey(self._shards, asked.wants)
            self._report(ScanAnswer(device=self._device, request=asked.request, found=found))


def _survey(shards: SurveyedShards, wants: Sequence[ScanRange]) -> tuple[ScanResult, ...]:
    """Look into shards. What cannot be read is reported, not raised."""
    found: list[ScanResult] = []
    for want in wants:
        try:
            extent = shards.survey(want.shard, want.start, want.limit)
        except ShardUnreadable as error:
            problem = error.problem
            found.append(ScanResult(shard=want.shard, bounds=(want.start,), items=(), is_end=False, problem=problem))
        else:
            found.append(ScanResult(shard=want.shard, bounds=extent.bounds, items=extent.items, is_end=extent.is_end))
    return tuple(found)
