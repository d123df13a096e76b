"""Surveys of shards for the master: which records there are, and where they begin and end.

They run on a thread of their own with separate readers, so that a slow disk or an unreachable stream delays nothing
else.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from oobleck.control.protocol import ScanAnswer, ScanRange, ScanRequest, ScanResult
from oobleck.errors import ShardUnreadable

from .shard_reader import Extent

Survey = Callable[[int, int, int], Extent]
"""Surveys a shard, by its number, from a position, up to a number of records. May raise ShardUnreadable."""


class ShardScanner:
    """The surveys of one worker. The control thread calls `ask`, which returns at once."""

    def __init__(self, survey: Survey, device: int, report: Callable[[ScanAnswer], None]) -> None:
        self._survey = survey
        self._device = device
        self._report = report
        self._requests: queue.SimpleQueue[ScanRequest] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="survey").start()

    def ask(self, request: ScanRequest) -> None:
        self._requests.put(request)

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            found = tuple(map(self._result, request.wants))
            self._report(ScanAnswer(device=self._device, request=request.request, found=found))

    def _result(self, want: ScanRange) -> ScanResult:
        problem: str | None = None
        try:
            extent = self._survey(want.shard, want.start, want.limit)
        except ShardUnreadable as error:
            extent, problem = Extent(bounds=(want.start,)), error.problem
        return ScanResult(
            shard=want.shard, bounds=extent.bounds, items=extent.items, is_end=extent.is_end, problem=problem
        )
