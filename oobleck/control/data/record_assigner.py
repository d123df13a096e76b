"""Which records a step takes: shards are opened in turn, and their records are taken once, in order.

    survey ──> records known ──> taken by a step ──> its commit        a step that is forgotten takes the same again
                                      │
                                      └── taken back (`go_back`): a checkpoint, or a shard in quarantine

It asks what lies in shards (`wants`), and gets the answers (`found`). The same order of calls takes the same records;
if shards do not grow, any order does.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace

from oobleck.control import protocol

MAX_OPEN = 64
"""The most shards open at once. A state's position names them all."""
MAX_LEFT = 32
"""The most shards in quarantine; if there are more, the shards are not the cause."""
_SHOWN_CHARS = 120
"""The length of a problem in a state's position."""
# Shards are looked into before they are opened, so that no step waits for a worker to read the first records.
_PREFETCHED = 8
_SURVEY_LIMIT = 4096
"""The most records in one answer."""


@dataclass(slots=True)
class _Known:
    """The known records of an open shard that are not taken yet."""

    bounds: list[int]
    items: list[int] = field(default_factory=list)
    """The predicted tokens of each record."""
    is_ended: bool = False

    @property
    def num_records(self) -> int:
        return len(self.items)

    def take(self, count: int) -> tuple[list[int], int]:
        """Take records; returns their bounds and predicted tokens."""
        bounds, num_items = self.bounds[: count + 1], sum(self.items[:count])
        del self.bounds[:count]
        del self.items[:count]
        return bounds, num_items


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    runs: tuple[protocol.RecordRun, ...]
    num_items: int
    after: protocol.DataPosition
    is_last: bool


@dataclass(slots=True)
class _Draft:
    """The next step, as far as its records are known."""

    runs: list[tuple[int, list[int]]] = field(default_factory=list)
    """(visit, bounds)"""
    num_records: int = 0
    num_items: int = 0

    def add(self, visit: int, bounds: list[int], num_items: int) -> None:
        if self.runs and self.runs[-1][0] == visit:
            self.runs[-1][1].extend(bounds[1:])
        else:
            self.runs.append((visit, bounds))
        self.num_records += len(bounds) - 1
        self.num_items += num_items


@dataclass(slots=True, eq=False)
class RecordAssigner:
    """The position after all taken records, and the known records that follow.

    A step takes `batch` records, in chunks from one shard each if it has enough. `at_once` shards are open at a time.
    """

    num_shards: int
    _: KW_ONLY
    seed: int
    batch: int
    chunk: int
    at_once: int
    epochs: int
    follows: bool
    """Shards grow, and one with nothing to give is skipped."""
    items_per_record: int
    _barred: dict[int, str] = field(default_factory=dict, init=False)
    """The shards in quarantine, with the problem of each."""
    _known: dict[int, _Known] = field(default_factory=dict, init=False)
    """The open visits and those that come next."""
    _draft: _Draft = field(default_factory=_Draft, init=False)
    _cursor: protocol.DataPosition = field(default_factory=protocol.DataPosition, init=False)
    """The position after the draft."""

    # --- where it is -------------------------------------------------------------------------------------------

    def go_back(self, position: protocol.DataPosition) -> None:
        """Take back all records since this position."""
        self._cursor = position
        self._known.clear()  # it has only the records that follow the old position
        self._draft = _Draft()

    def bar(self, shard: int, problem: str) -> None:
        """Put a shard in quarantine: no step takes more of it."""
        self._barred.setdefault(shard, problem[:_SHOWN_CHARS])

    @property
    def barred(self) -> tuple[int, ...]:
        return tuple(sorted(self._barred))

    @property
    def is_over(self) -> bool:
        """Whether every record was taken, except those in quarantine."""
        self._settle()
        return self._is_read and not self._draft.num_records

    def wants(self, num_records: int) -> tuple[protocol.ScanRange, ...]:
        """Return the questions that have to be answered to know `num_records` records beyond those taken."""
        self._settle()
        missing = num_records - self._draft.num_records - sum(known.num_records for known in self._known.values())
        if missing <= 0:
            return ()
        wants: dict[int, protocol.ScanRange] = {}
        for visit, start in self._next_visits():
            known = self._known.setdefault(visit, _Known([start]))
            shard = visit % self.num_shards
            # Two visits of one shard may be next at the end of an epoch. They are asked about one after the other,
            # because an answer names the shard and not the visit.
            if not known.is_ended and shard not in wants:
                wants[shard] = protocol.ScanRange(
                    shard=shard, start=known.bounds[-1], limit=min(missing, _SURVEY_LIMIT)
                )
        return tuple(wants.values())

    def found(self, found: protocol.ScanResult) -> bool:
        """Note an answer; False if it does not continue what is known."""
        for visit, known in self._known.items():
            is_its = visit % self.num_shards == found.shard
            # After `go_back` an answer to an older question begins elsewhere, and must not be appended.
            if is_its and not known.is_ended and found.bounds[0] == known.bounds[-1]:
                known.bounds += found.bounds[1:]
                known.items += found.items or [self.items_per_record] * (len(found.bounds) - 1)
                known.is_ended = found.is_end
                return True
        return False

    def _next_visits(self) -> list[tuple[int, int]]:
        """Return the open visits, and some that come next, with their positions."""
        opened = self._cursor.opened
        coming = (self._visit_at(at) for at in range(opened, min(opened + _PREFETCHED, self.epochs * self.num_shards)))
        wanted = [visit for visit in coming if visit % self.num_shards not in self._barred]
        return [(shard.visit, shard.next) for shard in self._cursor.open] + [(visit, 0) for visit in wanted]

    # --- what steps take ---------------------------------------------------------------------------------------

    def take(self) -> Taken | None:
        """Take the records of one more step; None if they are not all known, or there are none.

        O(records). The last step may have fewer.
        """
        self._settle()
        while self._draft.num_records < self.batch and self._take_chunk():
            self._settle()
        is_last = self._is_read
        draft = self._draft
        # A draft that is too small stays, and is filled up once more records are known.
        if not draft.num_records or (draft.num_records < self.batch and not is_last):
            return None
        self._draft = _Draft()
        return Taken(
            runs=tuple(
                protocol.RecordRun(shard=visit % self.num_shards, bounds=tuple(bounds)) for visit, bounds in draft.runs
            ),
            num_items=draft.num_items,
            after=self._cursor,
            is_last=is_last,
        )

    @property
    def _is_read(self) -> bool:
        return not self._cursor.open and self._cursor.opened == self.epochs * self.num_shards

    def _take_chunk(self) -> bool:
        """Move records from the shard whose turn it is to the draft; False if it has to be waited for."""
        wanted = min(self.chunk, self.batch - self._draft.num_records)
        at = self._whose_turn(wanted)
        if at is None:
            return False
        shards = list(self._cursor.open)
        shard = shards.pop(at)
        known = self._known[shard.visit]
        count = min(wanted, known.num_records)
        bounds, num_items = known.take(count)
        self._draft.add(shard.visit, bounds, num_items)
        # The shard goes to the end of the queue, so that the open shards take turns.
        shards.append(replace(shard, next=bounds[-1], records=shard.records + count))
        self._cursor = replace(self._cursor, open=tuple(shards), records=self._cursor.records + count)
        return True

    def _whose_turn(self, wanted: int) -> int | None:
        for at, shard in enumerate(self._cursor.open):
            known = self._known.get(shard.visit)
            count = 0 if known is None else known.num_records
            is_ended = known is not None and known.is_ended
            if count and (count >= wanted or is_ended or self.follows):
                return at
            # The shard is waited for, so that the records of steps are a function of the shards alone.
            if not self.follows:
                return None
        return None

    def _settle(self) -> None:
        """Close shards that are read, drop those in quarantine, and open the next ones."""
        cursor = self._cursor
        shards, left, opened = list(cursor.open), list(cursor.left), cursor.opened
        # A shard that opens here may turn out to be empty or in quarantine, and then makes room for the next one.
        while True:
            for shard in list(shards):
                known = self._known.get(shard.visit)
                problem = self._barred.get(shard.visit % self.num_shards)
                if known is not None and known.is_ended and not known.num_records:
                    shards.remove(shard)
                elif problem is not None:
                    shards.remove(shard)
                    left.append(
                        protocol.LeftShard(visit=shard.visit, next=shard.next, records=shard.records, problem=problem)
                    )
                else:
                    continue
                self._known.pop(shard.visit, None)
            if len(shards) >= self.at_once or opened == self.epochs * self.num_shards:
                break
            shards.append(protocol.OpenShard(visit=self._visit_at(opened)))
            opened += 1
        if (len(shards), len(left), opened) != (len(cursor.open), len(cursor.left), cursor.opened):
            self._cursor = replace(cursor, open=tuple(shards), left=tuple(left), opened=opened)

    def _visit_at(self, at: int) -> int:
        return protocol.visit_at(at, self.num_shards, seed=self.seed)
