"""What a worker knows of the records that steps take: a table that the control thread fills.

Records have numbers, in the order in which steps take them, so that a record of a shard is a sample as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oobleck.control.protocol import DataPosition, RecordsOver, StepRecords

NO_SAMPLE = -1
"""In place of a number: the last step may have fewer records than others, and nothing stands for those."""


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Where a record lies: in [start, stop) of a shard."""

    shard: int
    start: int
    stop: int


class Records:
    """`put` and `end` are the control thread's to call, all else the training thread's."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], StepRecords] = {}
        """By (assignment version, step)."""
        self._over: dict[int, RecordsOver] = {}
        """By assignment version."""
        self._assignment_version = 0
        self._located: dict[int, RecordLocation] = {}
        """The records of the step that was asked for last, by number."""
        self.position: DataPosition | None = None
        """Where in the data the run is after the step that was asked for last."""
        self._announce: Callable[[], None] = lambda: None

    def on_news(self, announce: Callable[[], None]) -> None:
        """Have `announce` called after each change that a wait may look for."""
        self._announce = announce

    # --- control thread ------------------------------------------------------------------------------------

    def put(self, records: StepRecords) -> None:
        """Note what a step takes."""
        self._told[records.assignment_version, records.step] = records
        self._announce()

    def end(self, over: RecordsOver) -> None:
        """Note that no step comes after one."""
        self._over[over.assignment_version] = over
        self._announce()

    # --- training thread -----------------------------------------------------------------------------------

    def follow(self, assignment_version: int, *, step: int) -> None:
        """From here on steps are those of an assignment version; all up to `step` are done."""
        self._assignment_version = assignment_version
        for key in [key for key in self._told if key[0] < assignment_version or key[1] < step]:
            self._told.pop(key, None)

    def is_told(self, step: int) -> bool:
        """Whether it is known what a step takes."""
        return (self._assignment_version, step) in self._told

    def over_after(self, step: int) -> RecordsOver | None:
        """What was said, if it was that no step comes after this one."""
        over = self._over.get(self._assignment_version)
        return over if over is not None and over.step == step else None

    def is_last(self, step: int) -> bool:
        """Whether no step comes after one that is known."""
        return self._told[self._assignment_version, step].is_last

    def numbers_of(self, step: int, batch: int) -> tuple[tuple[int, ...], int]:
        """Return the numbers of a step's records, `batch` with what stands for none, and the tokens they predict.

        `locate` knows them from then on, and those of no other step. O(batch).
        """
        records = self._told[self._assignment_version, step]
        self._told.pop((self._assignment_version, step - 2), None)
        self.position = records.after
        places = [
            RecordLocation(run.shard, run.bounds[at], run.bounds[at + 1])
            for run in records.runs
            for at in range(run.num_records)
        ]
        first = records.after.records - len(places)
        self._located = dict(enumerate(places, first))
        return (*self._located, *[NO_SAMPLE] * (batch - len(places))), records.num_items

    @property
    def first(self) -> int:
        """The number of the step's first record: a step has one at least."""
        return next(iter(self._located))

    def locate(self, number: int) -> RecordLocation:
        """Return where a record of the step lies."""
        return self._located[number]
