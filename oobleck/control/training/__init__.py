"""Training as the program of a run: every decision from its start through its recoveries to its end."""

from __future__ import annotations

from oobleck.control.recovery import Phase

from .coordinator import Coordinator
from .planning import check_kinds, fixed_schedule, one_kind_planner, planner_for, planner_settings, schedules_for
from .replayed_run import Replay, ReplayedRun, ReplayImage
from .startup import finished_text

__all__ = [
    "Coordinator",
    "Phase",
    "Replay",
    "ReplayImage",
    "ReplayedRun",
    "check_kinds",
    "finished_text",
    "fixed_schedule",
    "one_kind_planner",
    "planner_for",
    "planner_settings",
    "schedules_for",
]
