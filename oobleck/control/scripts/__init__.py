"""The decisions of `oobleck run`: when the ranks of a script start, on which nodes, and when all start again."""

from __future__ import annotations

from .coordinator import RanksCoordinator
from .hang import hung_rank
from .machine import TRANSITIONS, Transition, deadline, step
from .states import (
    Begin,
    Candidate,
    Clear,
    Ending,
    Failed,
    Finished,
    Gathering,
    GiveUpSilent,
    Gone,
    Input,
    Leave,
    LetGo,
    Over,
    Ready,
    Roster,
    Rules,
    Running,
    State,
    StopAsked,
    TimePassed,
)

__all__ = [
    "TRANSITIONS",
    "Begin",
    "Candidate",
    "Clear",
    "Ending",
    "Failed",
    "Finished",
    "Gathering",
    "GiveUpSilent",
    "Gone",
    "Input",
    "Leave",
    "LetGo",
    "Over",
    "RanksCoordinator",
    "Ready",
    "Roster",
    "Rules",
    "Running",
    "State",
    "StopAsked",
    "TimePassed",
    "Transition",
    "deadline",
    "hung_rank",
    "step",
]
