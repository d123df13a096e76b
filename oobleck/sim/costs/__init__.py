"""The costs of work and recoveries in a simulation, and the outcome of a simulated run."""

from __future__ import annotations

from .model import Costs, costs_from_json
from .node_kinds import NodeKinds
from .outcome import Activity, Outcome, Stretch, outcome_of_journal
from .step_times import StepTimes, costs_on

__all__ = [
    "Activity",
    "Costs",
    "NodeKinds",
    "Outcome",
    "StepTimes",
    "Stretch",
    "costs_from_json",
    "costs_on",
    "outcome_of_journal",
]
