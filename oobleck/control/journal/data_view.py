"""How far a run is in its shards, as the journal says: one line for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleck.control.protocol import DataPosition

from .state_entries import DataEntry, DataPlaced, RecordsDealt, ShardQuarantined, ShardsKnown


@dataclass(slots=True, kw_only=True)
class DataView:
    """Follows the journal's entries about shards. A value on the wire."""

    _num_shards: int = 0
    _quarantined: list[str] = field(default_factory=list)
    _placed: DataPosition = field(default_factory=DataPosition)
    _dealt: list[tuple[int, DataPosition, bool]] = field(default_factory=list)
    """(step, position after it, whether it is the last), of steps that are assigned and not committed."""
    _is_last: bool = False
    """No step comes after the newest committed one."""

    def apply(self, entry: DataEntry) -> None:
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
            _, self._placed, self._is_last = self._dealt.pop(0)

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
