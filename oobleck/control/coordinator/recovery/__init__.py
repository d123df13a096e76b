"""A recovery as one state machine, with what each input leads to; and what a recovery cost."""

from .machine import ASKING, FENCED, TRAINED, TRANSITIONS, Phase, Transition, deadline, phase, step
from .record import recovery_done

__all__ = [
    "ASKING",
    "FENCED",
    "TRAINED",
    "TRANSITIONS",
    "Phase",
    "Transition",
    "deadline",
    "phase",
    "recovery_done",
    "step",
]
