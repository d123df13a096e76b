"""The coordinator: every decision of a run, from its start through its recoveries to its end."""

from __future__ import annotations

from oobleck.control.recovery import GiveUp, Phase

from .coordinator import Coordinator
from .node_lifecycle import NodeLifecycle
from .planning import check_possible, fixed_schedule, planner_for, schedules_for
from .preparation import misfit_of
from .replayed_run import Replay, ReplayedRun, ReplayImage
from .requests import Effect as LifecycleEffect
from .requests import NodeTakenIn
from .resuming import finished_text
from .silence import Silence

__all__ = [
    "Coordinator",
    "GiveUp",
    "LifecycleEffect",
    "NodeLifecycle",
    "NodeTakenIn",
    "Phase",
    "Replay",
    "ReplayImage",
    "ReplayedRun",
    "Silence",
    "check_possible",
    "finished_text",
    "fixed_schedule",
    "misfit_of",
    "planner_for",
    "schedules_for",
]
