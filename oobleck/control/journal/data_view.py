"""How far a run is in its shards, as the journal says: one line for people."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from oobleck.control.protocol import DataPosition

from .state_entries import DataPlaced, RecordsDealt, ShardQuarantined, ShardsKnown


@dataclass(frozen=True, slots=True, kw_only=True)
class DataImage:
    """All that a `DataView` knows."""

    num_shards: int
    quarantined: tuple[str, ...]
    placed: DataPosition
    dealt: tuple[tuple[int, DataPosition, bool], ...]
    is_last: bool


class DataView:
    """Follows the journal's entries about shards. It keeps the steps that are assigned and not committed."""

    def __init__(self) -> None:
        self._num_shards = 0
        self._quarantined: list[str] = []
        self._placed = DataPosition()
        self._dealt: deque[tuple[int, DataPosition, bool]] = deque()
        """(step, position after it, whether it is the last), of the steps that are not committed."""
        self._is_last = False
        """No step comes after the newest committed one."""

    @classmethod
    def of_image(cls, image: DataImage) -> DataView:
        """Continue from what another one has come to."""
        view = cls()
        view._num_shards, view._quarantined = image.num_shards, list(image.quarantined)
        view._placed, view._dealt, view._is_last = image.placed, deque(image.dealt), image.is_last
        return view

    def image(self) -> DataImage:
        """Return all that it knows, for `of_image`."""
        return DataImage(
            num_shards=self._num_shards,
            quarantined=tuple(self._quarantined),
            placed=self._placed,
            dealt=tuple(self._dealt),
            is_last=self._is_last,
        )

    def apply(self, entry: ShardsKnown | DataPlaced | RecordsDealt | ShardQuarantined) -> None:
        """Take the next entry."""
        match entry:
            case ShardsKnown(names=names):
                self._num_shards = len(names)
            case DataPlaced(position=position):
                self._placed, self._is_last = position, False
                self._dealt.clear()
            case RecordsDealt(records=records):
                self._dealt.append((records.step, records.after, records.is_last))
            case ShardQuarantined(shard=shard):
                self._quarantined.append(shard)

    def commit(self, step: int) -> None:
        """A step is committed, and what it took is read."""
        while self._dealt and self._dealt[0][0] <= step:
            _, self._placed, self._is_last = self._dealt.popleft()

    def text(self, *, has_ended: bool) -> str | None:
        """What is read by now; None where the data is in no shards."""
        if not self._num_shards:
            return None
        position = self._placed
        done = position.opened - len(position.open) - len(position.left)
        words = [f"{position.records:,} records", f"{done} shards of {self._num_shards} read to the end"]
        if self._quarantined:
            words.append(f"{len(self._quarantined)} in quarantine: {', '.join(self._quarantined)}")
        if not self._dealt and not self._is_last and not has_ended:
            words.append("waiting for more data")
        return "; ".join(words)
