"""What work and recoveries cost in a simulation, and what a simulated run came to."""

from __future__ import annotations

from .costs import RecoveryCosts
from .outcome import Activity, Outcome, Stretch, outcome_of_journal
from .step_times import StepTimes, costs_on

__all__ = ["Activity", "Outcome", "RecoveryCosts", "StepTimes", "Stretch", "costs_on", "outcome_of_journal"]
