"""What the planner answers."""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.plan import ExecutionPlan, LayerTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan, why it is the one, and how to get there."""

    plan: ExecutionPlan
    action: str
    """start, reinstantiate, borrow, merge, rebuild or absorb."""
    reason: str
    """A plain sentence."""
    transfers: tuple[LayerTransfer, ...]
    predicted_step_s: float
    redundant: bool
    """At least f + 1 copies of each layer are on different nodes."""
