"""What nodes could not write of a script's states to disk. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from oobleck.control import journal, protocol
from oobleck.control.events import Turn


class Disks:
    def __init__(self) -> None:
        self._unwritten: dict[str, protocol.PartNotWritten] = {}
        """Of the newest state that each node could not write, in this start of ranks."""

    def fail(self, turn: Turn, node: str, part: protocol.PartNotWritten) -> None:
        """Record the first such state of a node in each start of ranks: each of its saves fails until there is room."""
        before = self._unwritten.get(node)
        if before is None or before.state.start != part.state.start:
            step, rank, reason = part.state.step, part.rank, part.reason
            turn.record(journal.StateUnwritten(t_s=turn.now_s, node=node, step=step, rank=rank, reason=reason))
        if before is None or part.state > before.state:
            self._unwritten[node] = part

    def why_lost(self, newest: protocol.ScriptState, nodes: Iterable[str]) -> str | None:
        """Return why a state of ranks on these nodes is on no disk, once they have ended; None if it is on one."""
        failed = {node: part for node, part in self._unwritten.items() if part.state >= newest}
        is_lost = any(part.is_sharded for part in failed.values()) or failed.keys() >= set(nodes)
        return next(f"{node}: {failed[node].reason}" for node in sorted(failed)) if is_lost else None
