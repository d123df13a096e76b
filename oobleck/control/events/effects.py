"""What a part of the coordinator returns: commands, and what it asks of the other parts.

No part calls another one. What it has to say goes back to the coordinator, which carries out one effect after the
other, in order: commands leave it, the rest concerns its parts. `control/coordinator` has more of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oobleck.control.journal import Notice
from oobleck.errors import ExitCode
from oobleck.planner import WorkerId

from .inputs import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """End the run, because it is finished or cannot continue. Later effects of the same turn are dropped."""

    reason: str
    exit_code: int = ExitCode.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectSteps:
    """It is a hang when no step is committed within this time, or many times the usual time."""

    within_s: float
    """Infinity: no step can be committed now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Have these copies of layers replaced by the others."""

    copies: Mapping[WorkerId, frozenset[int]]
    """Layers by holder."""


def notice(now_s: float, level: str, text: str) -> Record:
    """Have people told something."""
    return Record(entry=Notice(t_s=now_s, level=level, text=text))
