"""Which nodes are lost because they are silent, and when their silence is rather this master's fault.

A node that sends nothing for its lease is frozen, cut off or gone: it is lost, once a second look shows that no message
of it waits unread. But where most nodes fall silent together, this master is the one thing that they share: it was
stopped, or cut off from all. So it suspects itself: it gives no node up, and waits until it hears them again.

    heard ── the lease lapses ──> looked at again ── a few are silent ──> lost
      ^                                 └── most are silent ──> waited for ── too long ──> lost
      └───────── heard again ────────────────────────────────────────┘

This module judges silence alone. A connection that the other side has closed is proof, and needs no lease.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from oobleck.control.events import Turn
from oobleck.job import ControlSpec

from .membership import Membership
from .time_limits import reading_s

_LOOK_S = 0.1
"""Within this time, messages that arrived before the lease lapsed are read; `reading_s` allows more for many nodes."""
# Networks retry with doubled waits: a node that was cut off for a minute may be heard again only after two.
_MOST_SILENT_S = 120.0
"""How long most nodes may be silent while others are not."""


def are_most(num_silent: int, num_all: int) -> bool:
    """Return whether a master suspects itself: all nodes are silent, or half of them and at least two."""
    return num_silent > 0 and (num_silent == num_all or (num_silent >= 2 and 2 * num_silent >= num_all))


def patience_s(*, lease_s: float, orphan_timeout_s: float, has_others: bool) -> float:
    """Return how long most nodes may be silent before they are lost."""
    # Without others the run cannot continue, and gains nothing by giving up before the agents do.
    return max(lease_s, min(orphan_timeout_s, _MOST_SILENT_S) if has_others else orphan_timeout_s)


class Silence:
    """The nodes to look at again, and whether the master suspects itself. A look costs O(nodes)."""

    def __init__(self, control: ControlSpec, members: Membership) -> None:
        self._control = control
        self._members = members
        # A node heard just before all fell silent has been silent for less than a lease when the first lease lapses.
        self._silent_after_s = max(control.lease_s / 2, control.lease_s - 1.5 * control.heartbeat_interval_s)
        self._looks: dict[str, tuple[float, float]] = {}
        """(when it was last heard, when to look again) of each node whose lease has lapsed."""
        self._spared_until_s = 0.0
        """After most nodes were silent, none is lost before this."""
        self._silent_since_s = math.inf
        self._living: tuple[str, ...] | None = None
        self._first_heard_s = math.inf
        """When the first of `_living` was last heard, or an earlier time."""
        self._waited_for_s = math.inf
        """While it suspects itself: when the first silent node will have been silent for too long."""
        self._called_s = 0.0
        """When this master last heard something, or acted."""
        self._unheard_s = 0.0
        """How long it did neither before the newest call, where that was longer than a lease."""

    def note_call(self, now_s: float) -> None:
        if now_s - self._called_s > self._control.lease_s:
            self._unheard_s = now_s - self._called_s
        self._called_s = now_s

    def forgive(self, late_s: float) -> float:
        """Return how long this master was held up, if it acts `late_s` after it should have; else 0."""
        unheard_s, self._unheard_s = self._unheard_s, 0.0
        if late_s <= self._control.heartbeat_interval_s:  # leases have room for that
            return 0.0
        self._looks.clear()  # the messages of that time are still to be read: no lease has lapsed
        return max(late_s, unheard_s)

    @property
    def is_suspicious(self) -> bool:
        """Whether most nodes are silent, which may be this master's fault."""
        return math.isfinite(self._silent_since_s)

    @property
    def due_s(self) -> float:
        """The latest time at which to judge a node's silence."""
        if self.is_suspicious:
            return self._waited_for_s
        if self._looks:
            return min(map(self._judged_s, self._members.living_names), default=math.inf)
        # Every message asks for this, so it must not cost O(nodes): nodes heard since `recount` do not make it later.
        if self._living is not self._members.living_names:  # it is another tuple after any change of a member
            self.recount()
        return max(self._first_heard_s + self._control.lease_s, self._spared_until_s)

    def recount(self) -> None:
        """Make `due_s` exact."""
        self._living = self._members.living_names
        self._first_heard_s = self._first_of(self._living)

    def heard(self, turn: Turn) -> bool:
        """Note that a node sent something; return whether most nodes were silent until now."""
        if not self.is_suspicious or self._suspects(self._silent(turn.now_s)):
            return False
        silent_s = turn.now_s - self._silent_since_s
        self._trust_again(turn.now_s, silent_s)
        turn.note("info", f"nodes are heard again, after {silent_s:.1f} s")
        return True

    def take_silent(self, turn: Turn) -> dict[str, float]:
        """Judge the silence of all nodes; return the lost ones, each with how long it has been silent.

        There are none while this master suspects itself.
        """
        was_suspicious = self.is_suspicious
        lapsed = self._take_lapsed(turn.now_s)
        if self.is_suspicious and not was_suspicious:
            text = "most nodes have fallen silent at once; this master may be cut off itself, so they are waited for"
            turn.note("warning", text)
        return lapsed

    def _take_lapsed(self, now_s: float) -> dict[str, float]:
        living, heard_s = self._members.living_names, self._members.heard_s
        if self._looks:
            heard = {node: heard_s[node] for node in living}
            # A node that was heard since its lease lapsed starts over, and so does one that was lost and is back.
            self._looks = {node: look for node, look in self._looks.items() if heard.get(node) == look[0]}
        self.recount()
        if not self.is_suspicious and now_s < self.due_s:
            return {}  # most calls end here, without judging thousands of nodes one by one
        lapsed = [node for node in living if now_s >= self._judged_s(node)]
        if not self.is_suspicious:  # a message may have arrived and wait unread, so each node is looked at twice
            lapsed = [node for node in lapsed if self._was_looked_at(node, now_s)]
            if not lapsed:
                return {}
        silent = self._silent(now_s)
        if not self._suspects(silent):
            if self.is_suspicious:
                self._trust_again(now_s, now_s - self._silent_since_s)
                return {}
            self._looks.clear()
            return {node: now_s - heard_s[node] for node in lapsed}
        if not self.is_suspicious:  # it begins to suspect itself: all fell silent when the last of them was heard
            self._silent_since_s = max(heard_s[node] for node in silent)
        limit_s = patience_s(
            lease_s=self._control.lease_s,
            orphan_timeout_s=self._control.orphan_timeout_s,
            has_others=len(silent) < len(living),
        )
        self._waited_for_s = self._first_of(silent) + limit_s
        if now_s < self._waited_for_s:
            return {}
        # The silent nodes are given up here. The others get one more lease, and not all the time of the silence.
        self._trust_again(now_s, 0.0)
        return {node: now_s - heard_s[node] for node in silent if now_s >= heard_s[node] + self._control.lease_s}

    def _first_of(self, nodes: Iterable[str]) -> float:
        """When the node that has been silent longest was last heard; infinity for none."""
        return min(map(self._members.heard_s.__getitem__, nodes), default=math.inf)

    def _silent(self, now_s: float) -> Sequence[str]:
        since_s, heard_s = now_s - self._silent_after_s, self._members.heard_s
        return [node for node in self._members.living_names if heard_s[node] <= since_s]

    def _suspects(self, silent: Sequence[str]) -> bool:
        # Nodes that have notice of their end fall silent together for a reason of their own.
        silent = [node for node in silent if not self._members[node].has_notice]
        return are_most(len(silent), sum(not member.has_notice for member in self._members.living))

    def _judged_s(self, node: str) -> float:
        last_s = self._members.heard_s[node]
        lapses_s = max(last_s + self._control.lease_s, self._spared_until_s)
        heard_s, again_s = self._looks.get(node, (-math.inf, 0.0))
        return max(lapses_s, again_s) if heard_s == last_s else lapses_s

    def _was_looked_at(self, node: str, now_s: float) -> bool:
        """Whether a node was looked at since it was last heard; if not, have it looked at soon."""
        last_s = self._members.heard_s[node]
        heard_s, _ = self._looks.get(node, (-math.inf, 0.0))
        if heard_s == last_s:
            return True
        self._looks[node] = (last_s, now_s + reading_s(_LOOK_S, len(self._members.living_names)))
        return False

    def _trust_again(self, now_s: float, silent_s: float) -> None:
        """Spare all nodes for as long as most were silent, but no longer than a node needs to connect again."""
        # When some are heard again, the others are about to be: what kept them away has ended for all.
        longest_s = self._control.lease_s + self._control.connect_timeout_s
        self._spared_until_s = now_s + max(self._control.lease_s, min(silent_s, longest_s))
        self._silent_since_s = self._waited_for_s = math.inf
        self._looks.clear()
