"""What was decided after a loss, or at the start: a plan, and how the workers come to it."""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.control.checkpoints import Candidate
from oobleck.control.commit import Verdict
from oobleck.planner import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan to order, and how the survivors come to it."""

    decision: Decision
    verdict: Verdict
    finish: int | None = None
    """The step in flight, where it is finished before."""
    goes_back: bool = False
    """All go back to a checkpoint, or, without a candidate, to the model's initial values."""
    candidate: Candidate | None = None
    steps_lost: int = 0
    microbatches_redone: int = 0
    warning: str = ""
    """What people should know of it."""


def to_checkpoint(decision: Decision, candidate: Candidate, *, steps_lost: int = 0) -> Choice:
    """Send all workers back to a checkpoint, under this plan."""
    verdict = Verdict(applied=candidate.step, catch_up=None, adopted=None, held=candidate.held)
    return Choice(decision=decision, verdict=verdict, goes_back=True, candidate=candidate, steps_lost=steps_lost)
