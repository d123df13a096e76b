"""Why a plan has as many pipelines as it has: the plans with one more and one fewer, beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .decision import Decision
from .planner import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan with another number of pipelines."""

    num_pipelines: int
    decision: Decision | None
    """None where there is no such plan."""
    obstacle: str = ""
    """Why not."""


def pipeline_alternatives(planner: Planner, nodes: Sequence[str], chosen: Decision) -> tuple[Alternative, ...]:
    """Plan for one pipeline fewer and one more than chosen: two searches."""
    count = len(chosen.plan.pipelines)
    return tuple(_alternative(planner, nodes, number) for number in (count - 1, count + 1) if number >= 1)


def explain_num_pipelines(planner: Planner, chosen: Decision, alternatives: Sequence[Alternative]) -> str:
    """Say in a sentence what speaks against one pipeline fewer and one more."""
    parts = []
    for each in alternatives:
        if each.decision is None:
            parts.append(f"{each.num_pipelines} are not possible ({each.obstacle})")
            continue
        share = each.decision.predicted_step_s / chosen.predicted_step_s - 1
        pace = (
            f"take {100 * abs(share):.1f} % {'longer' if share > 0 else 'less'} a step"
            if abs(share) >= 5e-4
            else "be as fast"
        )
        parts.append(f"{each.num_pipelines} would {pace}{_shortfall(planner, each)}")
    count = len(chosen.plan.pipelines)
    if planner.settings.num_pipelines is not None:
        parts.insert(0, f"{planner.settings.num_pipelines} were asked for")
    return f"{count} pipeline{'s' if count != 1 else ''}: {'; '.join(parts)}"


def _alternative(planner: Planner, nodes: Sequence[str], number: int) -> Alternative:
    smallest = min(planner.templates(len(nodes)))
    if number > len(nodes) // smallest:
        obstacle = f"the model needs {smallest} node{'s' if smallest != 1 else ''}, so there is room for "
        return Alternative(
            num_pipelines=number, decision=None, obstacle=obstacle + f"{len(nodes) // smallest} in {len(nodes)}"
        )
    if number > planner.settings.num_microbatches:
        obstacle = f"a step has {planner.settings.num_microbatches} microbatches"
        return Alternative(num_pipelines=number, decision=None, obstacle=obstacle)
    other = Planner(planner.profile, replace(planner.settings, num_pipelines=number))
    return Alternative(num_pipelines=number, decision=other.initial_plan(nodes))


def _shortfall(planner: Planner, alternative: Alternative) -> str:
    wanted = planner.settings.fault_threshold + 1
    if alternative.num_pipelines >= wanted:
        return ""
    return f", and f = {planner.settings.fault_threshold} asks for at least {wanted}"
