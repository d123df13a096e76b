"""The start of a job: what all planners ask of its nodes, and how they say what they have decided."""

from __future__ import annotations

from collections.abc import Sequence

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan

from .decision import Decision
from .formatting import counted
from .settings import PlannerSettings


def check_nodes(nodes: Sequence[str]) -> None:
    """Raise PlanningError where there are no nodes, or one is named twice."""
    if len(set(nodes)) != len(nodes):
        twice = sorted({node for node in nodes if nodes.count(node) > 1})
        raise PlanningError(f"node {twice[0]} is named twice; every node has one name")
    if not nodes:
        raise PlanningError("no nodes were given; a plan needs at least 1")


def started(plan: ExecutionPlan, step_s: float, settings: PlannerSettings, *, sizes: str) -> Decision:
    """Return the decision to begin with a plan; `sizes` says which nodes its pipelines have."""
    num_nodes = len(plan.nodes)
    redundant = len(plan.pipelines) > settings.fault_threshold
    reason = f"{counted(num_nodes, 'node')} form{'s' if num_nodes == 1 else ''} "
    reason += f"{counted(len(plan.pipelines), 'pipeline')} ({sizes})"
    if plan.spares:
        reason += f", {counted(len(plan.spares), 'spare')} left"
    if not redundant:
        reason += f"; f = {settings.fault_threshold} asks for {settings.fault_threshold + 1}"
    return Decision(
        plan=plan, action="start", reason=reason, transfers=(), predicted_step_s=step_s, redundant=redundant
    )
