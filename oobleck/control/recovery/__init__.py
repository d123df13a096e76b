"""A recovery as one state machine, with what each input leads to; and what a recovery cost."""

from . import states
from .machine import FENCED, TRAINED, TRANSITIONS, Phase, Transition, always, deadline, phase, step
from .record import recovery_done
from .states import (
    Answers,
    BeginRecovery,
    CheckpointReported,
    CheckpointWanted,
    FailureSuspected,
    HeldUp,
    Recovery,
    RunEnded,
    TimePassed,
    WorkersResumed,
    WorkersWanted,
)

__all__ = [
    "FENCED",
    "TRAINED",
    "TRANSITIONS",
    "Answers",
    "BeginRecovery",
    "CheckpointReported",
    "CheckpointWanted",
    "FailureSuspected",
    "HeldUp",
    "Phase",
    "Recovery",
    "RunEnded",
    "TimePassed",
    "Transition",
    "WorkersResumed",
    "WorkersWanted",
    "always",
    "deadline",
    "phase",
    "recovery_done",
    "states",
    "step",
]
