"""Attempts: a part of a script that its processes enter again when a rank is lost.

Nothing here loads torch: a rank whose script has no attempts needs none of it.
"""

from __future__ import annotations

from .line import Line, set_line
from .loop import Attempt, Interrupted, asked_s, attempts, check_attempt, note_saved, on_next_attempt, resilient
from .stores import connect_once_served

__all__ = [
    "Attempt",
    "Interrupted",
    "Line",
    "asked_s",
    "attempts",
    "check_attempt",
    "connect_once_served",
    "note_saved",
    "on_next_attempt",
    "resilient",
    "set_line",
]
