"""The coordinator: every decision of a run, from its start through its recoveries to its end."""

from __future__ import annotations

from .coordinator import Coordinator, Phase
from .planning import fixed_schedule, planner_for, schedules_for
from .profile_key import profile_key
from .replayed_run import Replay, ReplayedRun, ReplayImage
from .resuming import finished_text

__all__ = [
    "Coordinator",
    "Phase",
    "Replay",
    "ReplayImage",
    "ReplayedRun",
    "finished_text",
    "fixed_schedule",
    "planner_for",
    "profile_key",
    "schedules_for",
]
