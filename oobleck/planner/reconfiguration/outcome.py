"""A move carried out on paper: what it leads to, which of two is better, and the decision that the best one is."""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.plan import ExecutionPlan
from oobleck.planner.decision import Decision
from oobleck.planner.inventory import Holding
from oobleck.planner.settings import PlannerSettings
from oobleck.planner.transfers import plan_transfers

from .changes import Changes
from .living_nodes import LivingNodes
from .wording import describe

_TOLERANCE = 1e-9
"""A move has to be better than a gentler one by more than this share."""

Score = tuple[int, float]
"""Pipelines too few or too many, then the weighed seconds of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where a move leads."""

    action: str
    detail: str
    """Completes the sentence of the decision."""
    plan: ExecutionPlan
    step_s: float
    score: Score
    arrivals: tuple[tuple[str, Holding], ...]
    """Nodes that have to receive layers, and what they have to hold."""


def beats(score: Score, other: Score) -> bool:
    """Return whether a score is truly better than that of a gentler move."""
    return score < (other[0], other[1] * (1 - _TOLERANCE))


def decision_of(outcome: Outcome, living: LivingNodes, changes: Changes, settings: PlannerSettings) -> Decision:
    """Return the decision for an outcome, with the transfers that lead there."""
    transfers = plan_transfers(outcome.arrivals, living.inventory, max_sources=settings.max_sources)
    return Decision(
        plan=outcome.plan,
        action=outcome.action,
        reason=describe(living, changes, outcome.detail, outcome.plan, transfers),
        transfers=transfers,
        predicted_step_s=outcome.step_s,
        redundant=len(outcome.plan.pipelines) > settings.fault_threshold,
    )
