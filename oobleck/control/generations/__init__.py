"""The decisions of `oobleck run`: when the ranks of a script start, on which nodes, and when all start again."""

from __future__ import annotations

from .coordinator import RanksCoordinator
from .hang import NodeSigns, hung_rank
from .machine import TRANSITIONS, Transition, deadline, step
from .rank_setup import RankSetup, is_shown, rank_environment, shown_text
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
    "NodeSigns",
    "Over",
    "RankSetup",
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
    "is_shown",
    "rank_environment",
    "shown_text",
    "step",
]
