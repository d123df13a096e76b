"""Whether the ranks of a node give signs of life, which their agent sees and the master must know. Pure.

What the master makes of it is in `generations`: whether all ranks of a script hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from oobleck.control.protocol import RanksQuiet

_IDLE_SHARE = 0.05
"""Of one processor: what a rank that waits may use, for the threads that libraries have beside."""


class NodeSigns:
    """The signs of life of one node's ranks in one generation."""

    def __init__(self, *, timeout_s: float, generation: int) -> None:
        self._timeout_s = timeout_s
        self._generation = generation
        self._count = 0
        self._since_s = 0.0
        self._used_s: Mapping[int, float] = {}
        self._has_shown = False
        self._said: RanksQuiet | None = None

    def look(self, now_s: float, *, count: int, used_s: Mapping[int, float]) -> RanksQuiet | None:
        """Take a look; returns what is to be said to the master, if that has changed.

        `count` grows with everything that ranks write or save; `used_s` is the processor time of each that runs.
        """
        if count != self._count or not self._used_s:
            self._has_shown = self._has_shown or count > 0
            self._count, self._since_s, self._used_s = count, now_s, dict(used_s)
        quiet_s = now_s - self._since_s
        is_quiet = quiet_s >= self._timeout_s
        said = RanksQuiet(
            generation=self._generation,
            is_quiet=is_quiet,
            has_shown=self._has_shown,
            idle=tuple(sorted(self._idle(used_s, quiet_s))) if is_quiet else (),
        )
        if said == self._said:
            return None
        self._said = said
        return said

    def _idle(self, used_s: Mapping[int, float], quiet_s: float) -> Iterable[int]:
        for rank, used in used_s.items():
            if used - self._used_s.get(rank, 0.0) < _IDLE_SHARE * quiet_s:
                yield rank
