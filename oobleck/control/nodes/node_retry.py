"""Lost nodes that may come back: when each is tried again.

A node that was frozen or cut off finds, once it is reachable again, that the run continued without it. Whatever still
runs there is ended, and it joins again. A node that is lost repeatedly costs the others a recovery each time, so it is
in quarantine until the user wants it back. A quarantined node that comes back by itself, as a process that restarts
whenever it ends, stays out until its losses are ten minutes old, which limits what it costs the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oobleck.job import NodeSpec

_LONGEST_WAIT_S = 600.0
QUARANTINE_LOSSES = 3
"""A node that is lost this often within `_QUARANTINE_WITHIN_S` is not tried again."""
_QUARANTINE_WITHIN_S = 600.0


@dataclass(slots=True)
class _Lost:
    spec: NodeSpec
    wait_s: float
    due_s: float
    """Infinity while a try is under way."""


class NodeRetry:
    """The nodes to try again, with twice the wait after each try."""

    def __init__(self, *, first_wait_s: float) -> None:
        """A lost node is tried again after `first_wait_s`; 0 for never."""
        self._first_wait_s = first_wait_s
        self._lost: dict[str, _Lost] = {}
        self._losses: dict[str, tuple[float, ...]] = {}
        """When each node was lost, as far as that still counts."""

    def __contains__(self, node: str) -> bool:
        return node in self._lost

    @property
    def is_on(self) -> bool:
        """Whether lost nodes are tried again at all."""
        return self._first_wait_s > 0

    @property
    def due_s(self) -> float:
        """When to try the next node; infinity for never."""
        return min((lost.due_s for lost in self._lost.values()), default=math.inf)

    def note_lost(self, spec: NodeSpec, now_s: float) -> bool:
        """Have a node tried again; return False if it is in quarantine now."""
        losses = (*self._recent_losses(spec.name, now_s), now_s)
        self._losses[spec.name] = losses
        if not self._first_wait_s:
            return True  # without retries there is no quarantine to enter
        if len(losses) >= QUARANTINE_LOSSES:
            return False
        self._lost[spec.name] = _Lost(spec, self._first_wait_s, now_s + self._first_wait_s)
        return True

    def _recent_losses(self, node: str, now_s: float) -> tuple[float, ...]:
        return tuple(t_s for t_s in self._losses.get(node, ()) if t_s > now_s - _QUARANTINE_WITHIN_S)

    def note_back(self, spec: NodeSpec, now_s: float) -> bool:
        """A node comes back by itself; return False if it is in quarantine, to be tried once that is over."""
        losses = self._recent_losses(spec.name, now_s)
        if len(losses) < QUARANTINE_LOSSES:
            self.forget(spec.name)
            return True
        if self._first_wait_s:
            # Quarantine is over once this loss no longer counts, and fewer than the limit are left.
            due_s = losses[-QUARANTINE_LOSSES] + _QUARANTINE_WITHIN_S
            self._lost[spec.name] = _Lost(spec, self._first_wait_s, due_s)
        return False

    def forgive(self, node: str) -> None:
        """The user wants a node back: its losses no longer count."""
        self.forget(node)
        self._losses.pop(node, None)

    def note_failed(self, node: str, now_s: float) -> None:
        """Double the wait before the next try, because one has failed."""
        lost = self._lost[node]
        lost.wait_s = min(2 * lost.wait_s, _LONGEST_WAIT_S)
        lost.due_s = now_s + lost.wait_s

    def forget(self, node: str) -> NodeSpec | None:
        """Stop trying a node, which is back or not wanted; return its spec, None if it was not tried."""
        lost = self._lost.pop(node, None)
        return None if lost is None else lost.spec

    def take_due(self, now_s: float) -> tuple[NodeSpec, ...]:
        due = [lost for lost in self._lost.values() if lost.due_s <= now_s]
        for lost in due:
            lost.due_s = math.inf
        return tuple(lost.spec for lost in due)
