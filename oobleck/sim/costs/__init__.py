"""The costs of work and recoveries in a simulation, and the outcome of a simulated run."""

from __future__ import annotations

from .checkpoints import daly_interval_s, mean_time_to_loss_s
from .model import Costs, changes_from_json, costs_for, with_changes
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
    "changes_from_json",
    "costs_for",
    "costs_on",
    "daly_interval_s",
    "mean_time_to_loss_s",
    "outcome_of_journal",
    "with_changes",
]
