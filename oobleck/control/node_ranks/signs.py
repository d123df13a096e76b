"""Whether the ranks of a node show signs of life, for their agent to report. Pure.

`control/scripts/hang.py` concludes from the reports whether all ranks of a script hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from oobleck.control.protocol import RanksQuiet

_IDLE_SHARE = 0.05
"""The share of a processor that a waiting rank may use, for the threads of libraries."""


class NodeSigns:
    """The signs of life of one node's ranks in one generation."""

    def __init__(self, *, timeout_s: float, generation: int) -> None:
        self._timeout_s = timeout_s
        self._generation = generation
        self._count = 0
        self._since_s = 0.0
        self._used_s: Mapping[int, float] = {}
        self._has_shown = False
        self._report: RanksQuiet | None = None

    def look(self, now_s: float, *, count: int, used_s: Mapping[int, float]) -> RanksQuiet | None:
        """Return the report for the master if it has changed, else None.

        `count` grows with everything that ranks write or save; `used_s` is the processor time of each running rank.
        """
        if count != self._count or not self._used_s:
            self._has_shown = self._has_shown or count > 0
            self._count, self._since_s, self._used_s = count, now_s, dict(used_s)
        quiet_s = now_s - self._since_s
        is_quiet = quiet_s >= self._timeout_s
        report = RanksQuiet(
            generation=self._generation,
            is_quiet=is_quiet,
            has_shown=self._has_shown,
            idle=tuple(sorted(self._idle(used_s, quiet_s))) if is_quiet else (),
        )
        if report == self._report:
            return None
        self._report = report
        return report

    def _idle(self, used_s: Mapping[int, float], quiet_s: float) -> Iterable[int]:
        for rank, used in used_s.items():
            if used - self._used_s.get(rank, 0.0) < _IDLE_SHARE * quiet_s:
                yield rank
