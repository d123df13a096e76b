"""Which side is silent: nodes, which are lost by it, or this master, which may be held up or cut off."""

from __future__ import annotations

from oobleck.control.events import Turn
from oobleck.job import ControlSpec

from .leases import Leases


class Silence:
    """Judges the silence of nodes, and knows when this master was last called."""

    def __init__(self, control: ControlSpec, leases: Leases) -> None:
        self._control = control
        self._leases = leases
        self._called_s = 0.0
        """When something was heard, or acted on, last."""
        self._unheard_s = 0.0
        """How long nothing was, up to the newest event, where that was longer than a lease."""

    @property
    def due_s(self) -> float:
        """When to judge a silence next, at the latest."""
        return self._leases.due_s

    def recount(self) -> None:
        """Have `due_s` count those who have spoken since the last time; O(nodes)."""
        self._leases.recount()

    @property
    def is_suspicious(self) -> bool:
        """Most nodes are silent, and it may be us."""
        return self._leases.is_suspicious

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
        self._leases.forgive()
        return max(late_s, unheard_s)

    def heard(self, turn: Turn) -> bool:
        """A node sent something. Returns whether most nodes were silent until now."""
        silent_s = self._leases.heard(turn.now_s)
        if silent_s is not None:
            turn.note("info", f"nodes are heard of again, after {silent_s:.1f} s")
        return silent_s is not None

    def take_silent(self, turn: Turn) -> dict[str, float]:
        """The nodes that are lost by their silence, each with how long it has lasted.

        There are none if this master may be the one that hears nothing.
        """
        was_suspicious = self._leases.is_suspicious
        lapsed = self._leases.take_lapsed(turn.now_s)
        if self._leases.is_suspicious and not was_suspicious:
            text = "most nodes have fallen silent at once; this master may be cut off itself, so they are waited for"
            turn.note("warning", text)
        return lapsed
