"""Why a plan has the pipelines that it has: what others would do, beside it."""

from __future__ import annotations

from collections.abc import Sequence

from oobleck.errors import PlanningError

from .formatting import counted
from .planner import Planner
from .values import Decision


def explain_pipelines(planner: Planner, nodes: Sequence[str], chosen: Decision) -> str:
    """Say in a sentence what speaks against one pipeline fewer and one more, or against one kind of nodes in each.

    One or two searches.
    """
    if len(planner.kinds) > 1:
        return _without_mixing(planner, nodes, chosen)
    count = len(chosen.plan.pipelines)
    parts = [_with_as_many(planner, nodes, number, chosen) for number in (count - 1, count + 1) if number >= 1]
    if planner.settings.num_pipelines is not None:
        parts.insert(0, f"{planner.settings.num_pipelines} were asked for")
    return f"{counted(count, 'pipeline')}: {'; '.join(parts)}"


def _with_as_many(planner: Planner, nodes: Sequence[str], number: int, chosen: Decision) -> str:
    smallest, num_microbatches = min(planner.templates(len(nodes))), planner.settings.num_microbatches
    if number > len(nodes) // smallest:
        room = f"there is room for {len(nodes) // smallest} in {len(nodes)}"
        return f"{number} are not possible (the model needs {counted(smallest, 'node')}, so {room})"
    if number > num_microbatches:
        return f"{number} are not possible (a step has {num_microbatches} microbatches)"
    other = planner.with_changes(num_pipelines=number).initial_plan(nodes)
    share, wanted = other.predicted_step_s / chosen.predicted_step_s - 1, planner.settings.fault_threshold + 1
    longer = f"take {100 * abs(share):.1f} % {'longer' if share > 0 else 'less'} a step"
    shortfall = f", and f = {planner.settings.fault_threshold} asks for at least {wanted}" if number < wanted else ""
    return f"{number} would {longer if abs(share) >= 5e-4 else 'be as fast'}{shortfall}"


def _without_mixing(planner: Planner, nodes: Sequence[str], chosen: Decision) -> str:
    subject = "pipelines with nodes of one kind each"
    if all(len(set(map(planner.kind_of, pipeline.nodes))) == 1 for pipeline in chosen.plan.pipelines):
        return f"these are {subject}; mixing them saves nothing"
    try:
        other = planner.with_changes(num_pipelines=planner.settings.num_pipelines, mixes=False).initial_plan(nodes)
    except PlanningError:
        return f"{subject} cannot hold the model"
    share = other.predicted_step_s / chosen.predicted_step_s - 1
    fewer = len(other.plan.pipelines) < min(len(chosen.plan.pipelines), planner.settings.fault_threshold + 1)
    return f"{subject} would take {100 * share:.1f} % longer a step" + (", with fewer copies" if fewer else "")
