"""Where a recovery is and what follows from each input, as one state machine; and what a recovery cost."""

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
