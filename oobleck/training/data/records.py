"""The records that steps take: a table that the control thread of a worker fills.

Records are numbered in the order in which steps take them, so a record of a shard is a sample like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oobleck.control.protocol import DataPosition, StepRecords, StepsOver

NO_SAMPLE = -1
"""The filler among a step's numbers, since the last step may have fewer records than others."""


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """A record, in [start, stop) of a shard."""

    shard: int
    start: int
    stop: int


class Records:
    """The table. The control thread calls `put` and `end`, the training thread everything else."""

    def __init__(self) -> None:
        self._by_step: dict[tuple[int, int], StepRecords] = {}  # keyed by assignment version and step
        self._over: dict[int, StepsOver] = {}  # keyed by assignment version
        self._assignment_version = 0
        self._located: dict[int, RecordLocation] = {}
        self.position: DataPosition | None = None
        """The run's position in the data after the step of the last `numbers_of`."""
        self._announce: Callable[[], None] = lambda: None

    def on_news(self, announce: Callable[[], None]) -> None:
        """Call `announce` after each change that a wait may depend on."""
        self._announce = announce

    # --- control thread ------------------------------------------------------------------------------------

    def put(self, records: StepRecords) -> None:
        self._by_step[records.assignment_version, records.step] = records
        self._announce()

    def end(self, over: StepsOver) -> None:
        self._over[over.assignment_version] = over
        self._announce()

    # --- training thread -----------------------------------------------------------------------------------

    def follow(self, assignment_version: int, *, step: int) -> None:
        """Follow an assignment version from now on; all steps up to `step` are done."""
        self._assignment_version = assignment_version
        for known in list(self._by_step):  # a copy, since the control thread may call `put` meanwhile
            if known[0] < assignment_version or known[1] < step:
                self._by_step.pop(known, None)

    def is_told(self, step: int) -> bool:
        return (self._assignment_version, step) in self._by_step

    def over_after(self, step: int) -> StepsOver | None:
        """Return the message that this step is the last, if it has arrived."""
        over = self._over.get(self._assignment_version)
        return over if over is not None and over.step == step else None

    def is_last(self, step: int) -> bool:
        """Return whether no step follows a known one."""
        return self._by_step[self._assignment_version, step].is_last

    def numbers_of(self, step: int, batch: int) -> tuple[tuple[int, ...], int]:
        """Return the numbers of a step's records, filled up to `batch`, and the number of tokens that they predict.

        From then on `locate` knows these records, and no others. O(batch).
        """
        records = self._by_step[self._assignment_version, step]
        self._by_step.pop((self._assignment_version, step - 2), None)
        self.position = records.after
        locations = [
            RecordLocation(run.shard, run.bounds[at], run.bounds[at + 1])
            for run in records.runs
            for at in range(run.num_records)
        ]
        self._located = dict(enumerate(locations, records.after.records - len(locations)))
        return (*self._located, *[NO_SAMPLE] * (batch - len(locations))), records.num_items

    @property
    def first(self) -> int:
        """The number of the step's first record, of which there is at least one."""
        return next(iter(self._located))

    def locate(self, number: int) -> RecordLocation:
        return self._located[number]
