"""Who is lost by silence, and when silence says more of us than of the nodes.

A node that says nothing for its lease is frozen, cut off or gone: it is lost, once a look shows that no words of its
wait unread. But where most nodes fall silent together, the one thing that they share is this master, which was stopped,
or cut off from all. So it suspects itself: it gives no node up, and waits until it hears of them again.

    heard ── the lease lapses ──> looked at again ── a few are silent ──> lost
      ^                                 └── most are silent ──> waited for ── too long ──> lost
      └───────── heard again ────────────────────────────────────────┘

Silence alone is judged here. A connection that the other side has closed is proof, and needs no lease.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from oobleck.control.events import Turn
from oobleck.job import ControlSpec

from .membership import Membership
from .time_limits import reading_s

_LOOK_S = 0.1
"""What was said before the lease lapsed, and waits unread, is read within this time; of many nodes, in more."""
_MOST_SILENT_S = 120.0
"""For how long most nodes may be silent while others are not. The network is tried again after twice the time each
time: what was cut for a minute may be heard of only after two."""


def are_most(num_silent: int, num_all: int) -> bool:
    """Whether so many silent ones of all make a master suspect itself: all of them, or half, and two at least."""
    return num_silent > 0 and (num_silent == num_all or (num_silent >= 2 and 2 * num_silent >= num_all))


def patience_s(*, lease_s: float, orphan_timeout_s: float, has_others: bool) -> float:
    """For how long most nodes may be silent before they are lost.

    Without others there is none to continue with, and nothing to be gained by giving up before the agents do.
    """
    return max(lease_s, min(orphan_timeout_s, _MOST_SILENT_S) if has_others else orphan_timeout_s)


class Silence:
    """The nodes to look at again, and whether the master suspects itself. A look costs O(nodes)."""

    def __init__(self, control: ControlSpec, members: Membership) -> None:
        self._control = control
        self._members = members
        # Who was heard of just before all fell silent has been silent for less than a lease when the first one lapses.
        self._silent_after_s = max(control.lease_s / 2, control.lease_s - 1.5 * control.heartbeat_interval_s)
        self._looks: dict[str, tuple[float, float]] = {}
        """By node whose lease has lapsed: (when it was heard of, when it is looked at again)."""
        self._spared_until_s = 0.0
        """After a silence of most, no node is lost before this."""
        self._silent_since_s = math.inf
        self._living: tuple[str, ...] | None = None
        self._first_heard_s = math.inf
        """When the first of `_living` was heard of, or an earlier time."""
        self._waited_for_s = math.inf
        """While it suspects itself: when the first of the silent nodes has been silent for too long."""
        self._called_s = 0.0
        """When this master has heard something, or acted, last."""
        self._unheard_s = 0.0
        """How long it had not, up to the newest event, where that was longer than a lease."""

    def note_call(self, now_s: float) -> None:
        """This master acts: it is not held up."""
        if now_s - self._called_s > self._control.lease_s:
            self._unheard_s = now_s - self._called_s
        self._called_s = now_s

    def forgive(self, now_s: float, late_s: float) -> float:
        """Return how long this master was held up, if it acts `late_s` after it should have; else 0.

        The messages of that time are still to be read, and no node had our answers: no lease has lapsed.
        """
        unheard_s, self._unheard_s = self._unheard_s, 0.0
        if late_s <= self._control.heartbeat_interval_s:
            return 0.0
        self._looks.clear()
        return max(late_s, unheard_s)

    @property
    def is_suspicious(self) -> bool:
        """Most nodes are silent, and it may be us."""
        return math.isfinite(self._silent_since_s)

    @property
    def due_s(self) -> float:
        """When somebody's silence is to be judged next, at the latest.

        Those who have spoken since `recount` do not make it later: it is asked for with every message, and may not cost
        O(nodes) each time.
        """
        if self.is_suspicious:
            return self._waited_for_s
        if self._looks:
            return min(map(self._judged_s, self._members.living_names), default=math.inf)
        if self._living is not self._members.living_names:  # it is another tuple after any change of a member
            self.recount()
        return max(self._first_heard_s + self._control.lease_s, self._spared_until_s)

    def recount(self) -> None:
        """Have `due_s` say exactly when somebody's silence is to be judged."""
        self._living = self._members.living_names
        self._first_heard_s = self._first_of(self._living)

    def heard(self, turn: Turn) -> bool:
        """A node sent something. Returns whether most nodes were silent until now."""
        if not self.is_suspicious or self._suspects(self._silent(turn.now_s)):
            return False
        silent_s = turn.now_s - self._silent_since_s
        self._trust_again(turn.now_s, silent_s)
        turn.note("info", f"nodes are heard of again, after {silent_s:.1f} s")
        return True

    def take_silent(self, turn: Turn) -> dict[str, float]:
        """Judge the silence of all: return the nodes that are lost by it, each with how long it has been silent.

        There are none if this master may be the one that hears nothing.
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
            self._looks = {node: look for node, look in self._looks.items() if heard.get(node) == look[0]}
        self.recount()
        if not self.is_suspicious and now_s < self.due_s:
            return {}  # by far the most calls: thousands of nodes are not judged one by one
        lapsed = [node for node in living if now_s >= self._judged_s(node)]
        if not self.is_suspicious:
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
        if not self.is_suspicious:
            self._silent_since_s = max(heard_s[node] for node in silent)
        limit_s = patience_s(
            lease_s=self._control.lease_s,
            orphan_timeout_s=self._control.orphan_timeout_s,
            has_others=len(silent) < len(living),
        )
        self._waited_for_s = self._first_of(silent) + limit_s
        if now_s < self._waited_for_s:
            return {}
        self._trust_again(now_s, 0.0)
        return {node: now_s - heard_s[node] for node in silent if now_s >= heard_s[node] + self._control.lease_s}

    def _first_of(self, nodes: Iterable[str]) -> float:
        """When the one of them that has been silent longest was heard of; infinity for none."""
        return min(map(self._members.heard_s.__getitem__, nodes), default=math.inf)

    def _silent(self, now_s: float) -> Sequence[str]:
        since_s, heard_s = now_s - self._silent_after_s, self._members.heard_s
        return [node for node in self._members.living_names if heard_s[node] <= since_s]

    def _suspects(self, silent: Sequence[str]) -> bool:
        """Whether this master is to be suspected: no silence of nodes that have had notice of their end says so."""
        silent = [node for node in silent if not self._members[node].has_notice]
        return are_most(len(silent), sum(not member.has_notice for member in self._members.living))

    def _judged_s(self, node: str) -> float:
        last_s = self._members.heard_s[node]
        lapses_s = max(last_s + self._control.lease_s, self._spared_until_s)
        heard_s, again_s = self._looks.get(node, (-math.inf, 0.0))
        return max(lapses_s, again_s) if heard_s == last_s else lapses_s

    def _was_looked_at(self, node: str, now_s: float) -> bool:
        """Whether a node was looked at before, since it was heard of last; else that is done soon."""
        last_s = self._members.heard_s[node]
        heard_s, _ = self._looks.get(node, (-math.inf, 0.0))
        if heard_s == last_s:
            return True
        self._looks[node] = (last_s, now_s + reading_s(_LOOK_S, len(self._members.living_names)))
        return False

    def _trust_again(self, now_s: float, silent_s: float) -> None:
        """Some are heard of again: the others are about to be, as long as they were silent, or until reached again."""
        longest_s = self._control.lease_s + self._control.connect_timeout_s
        self._spared_until_s = now_s + max(self._control.lease_s, min(silent_s, longest_s))
        self._silent_since_s = self._waited_for_s = math.inf
        self._looks.clear()
