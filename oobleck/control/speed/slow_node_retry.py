"""When a slow node that a plan has left out gets another chance.

Most slow-downs pass, and nothing measures a node that rests. So after a while it counts as a node of usual speed. If it
is still slow, its reports show it, it is left out again, and waits twice as long: all tries together cost little.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

# Both are multiples of the time in which a slow node is found out, which is what a try costs if it is still slow.
_FIRST_WAIT = 20
_LONGEST_WAIT = 160


@dataclass(slots=True)
class _Waiting:
    wait_s: float
    due_s: float
    is_tried: bool = False


class SlowNodeRetry:
    """The nodes that rest because they are slow, and those that were tried again."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    @property
    def due_s(self) -> float:
        """When to try the next node; infinity for never."""
        return min((each.due_s for each in self._waiting.values() if not each.is_tried), default=math.inf)

    def leave_out(self, nodes: Collection[str], now_s: float, *, found_out_s: float) -> None:
        """Let exactly these nodes rest; `found_out_s` is the time in which a slow one is found out."""
        back = [node for node, each in self._waiting.items() if not each.is_tried and node not in nodes]
        for node in back:
            del self._waiting[node]
        for node in nodes:
            before = self._waiting.get(node)
            if before is not None and not before.is_tried:
                continue
            wait_s = _FIRST_WAIT * found_out_s
            if before is not None and now_s < before.due_s + before.wait_s:  # It was tried too early.
                wait_s = min(2 * before.wait_s, _LONGEST_WAIT * found_out_s)
            self._waiting[node] = _Waiting(wait_s, now_s + wait_s)

    def forget(self, node: str) -> None:
        """Forget that a node was slow: it is lost, or starts again."""
        self._waiting.pop(node, None)

    def take_due(self, now_s: float) -> list[str]:
        due = [node for node, each in self._waiting.items() if not each.is_tried and each.due_s <= now_s]
        for node in due:
            self._waiting[node].due_s, self._waiting[node].is_tried = now_s, True
        return due
