"""How far a run is in its shards, as the journal says: one line for people."""

from __future__ import annotations

from collections import deque

from oobleck.control.protocol import DataPosition

from .state_entries import DataPlaced, RecordsDealt, ShardQuarantined, ShardsKnown

__all__ = ["DataView"]


class DataView:
    """Follows the journal's entries about shards. `at` costs O(steps that are assigned and not committed)."""

    def __init__(self) -> None:
        self._num_shards = 0
        self._quarantined: list[str] = []
        self._placed = DataPosition()
        self._dealt: deque[tuple[int, DataPosition, bool]] = deque()
        """(step, position after it, whether it is the last)"""

    def apply(self, entry: ShardsKnown | DataPlaced | RecordsDealt | ShardQuarantined) -> None:
        """Take the next entry."""
        match entry:
            case ShardsKnown(names=names):
                self._num_shards = len(names)
            case DataPlaced(position=position):
                self._placed = position
                self._dealt.clear()
            case RecordsDealt(records=records):
                self._dealt.append((records.step, records.after, records.is_last))
            case ShardQuarantined(shard=shard):
                self._quarantined.append(shard)

    def at(self, step: int, *, has_ended: bool) -> str | None:
        """What is read once a step is committed; None where the data is in no shards."""
        if not self._num_shards:
            return None
        is_last = False
        while self._dealt and self._dealt[0][0] <= step:
            _, self._placed, is_last = self._dealt.popleft()
        position = self._placed
        done = position.opened - len(position.open) - len(position.left)
        words = [f"{position.records:,} records", f"{done} shards of {self._num_shards} read to the end"]
        if self._quarantined:
            words.append(f"{len(self._quarantined)} in quarantine: {', '.join(self._quarantined)}")
        if not self._dealt and not is_last and not has_ended:
            words.append("waiting for more data")
        return "; ".join(words)
