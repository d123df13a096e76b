"""Training as the program of a run: every decision from its start through its recoveries to its end."""

from __future__ import annotations

from oobleck.control.recovery import Phase

from .coordinator import Coordinator
from .planning import check_possible, choose_sharding, fixed_schedule, planner_for, schedules_for
from .replayed_run import ReplayedRun
from .startup import CONTINUING, NOTHING_TO_CONTINUE, finished_text

__all__ = [
    "CONTINUING",
    "NOTHING_TO_CONTINUE",
    "Coordinator",
    "Phase",
    "ReplayedRun",
    "check_possible",
    "choose_sharding",
    "finished_text",
    "fixed_schedule",
    "planner_for",
    "schedules_for",
]
