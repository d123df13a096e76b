"""What work and recoveries cost in a simulation, and what a simulated run came to."""

from __future__ import annotations

from .costs import RecoveryCosts
from .outcome import Activity, Outcome, Stretch, outcome_of_journal
from .pace import Pace, costs_on

__all__ = ["Activity", "Outcome", "Pace", "RecoveryCosts", "Stretch", "costs_on", "outcome_of_journal"]
