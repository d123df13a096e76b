"""`oobleck plan` for nodes of several kinds: their profiles, the planner, and what `--prices` asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from oobleck.errors import PlanningError, UsageError
from oobleck.planner import Decision, MixedPlanner, NodeKind, PlannerSettings
from oobleck.planner.what_if import what_if_one_is_lost, what_if_two_are_lost
from oobleck.schedule import ScheduleKind
from oobleck.schedule.forecast import Forecast, forecast
from oobleck.ui.plan_report import AfterLosing, PlanReport, Priced

from .inputs import KindCount
from .make_report import MAX_CASES
from .plan_profile import ProfileSource, profile_of


def kinds_of(
    counts: Sequence[KindCount], source: ProfileSource, profiles: Mapping[str, Path] | None
) -> tuple[NodeKind, ...]:
    """Read or estimate the profile of each kind: its name is that of its device, unless `profiles` has files."""
    if source.file is not None:
        raise UsageError("--profile and kinds of nodes were both given; pass --profiles KIND:FILE,KIND:FILE")
    if source.device is not None:
        raise UsageError("--device and kinds of nodes were both given; a kind's name is its device")
    kinds = []
    for count in counts:
        own = replace(source, devices_per_node=1, device=count.kind)
        if profiles is not None:
            own = replace(own, device=None, file=profiles[count.kind])
        devices = count.devices_per_node or source.devices_per_node
        kinds.append(NodeKind(name=count.kind, profile=profile_of(own), devices_per_node=devices))
    return tuple(kinds)


def make_mixed_report(
    kinds: Sequence[NodeKind],
    kind_of: Mapping[str, str],
    settings: PlannerSettings,
    *,
    global_batch_size: int,
    kind: ScheduleKind | None,
    lost: tuple[str, ...] = (),
    prices: Mapping[str, float] | None = None,
) -> PlanReport:
    """Plan for the nodes, and decide what losses would lead to. Raises PlanningError where there is no plan."""
    names = list(kind_of)
    planner = MixedPlanner(kinds, settings, kind_of)
    decision = planner.initial_plan(names)
    found = _forecast(planner, decision, kind)
    after = planner.reconfigure(decision.plan, lost=lost) if lost else None
    return PlanReport(
        profile=planner.profile_of(names[0]),
        num_nodes=len(names),
        devices_per_node=max(each.devices_per_node for each in kinds),
        kinds=tuple(
            (each.name, sum(kind == each.name for kind in kind_of.values()), each.devices_per_node) for each in kinds
        ),
        kind_of=kind_of,
        fault_threshold=settings.fault_threshold,
        global_batch_size=global_batch_size,
        decision=decision,
        forecast=found,
        why=_without_mixing(planner, kind_of, decision),
        templates=(),
        losses=(
            what_if_one_is_lost(planner, decision.plan, max_cases=MAX_CASES),
            *((what_if_two_are_lost(planner, decision.plan, max_cases=MAX_CASES),) if len(names) > 1 else ()),
        ),
        after=None
        if after is None
        else AfterLosing(lost=lost, decision=after, forecast=_forecast(planner, after, kind)),
        priced=_priced(planner, names, found, prices, global_batch_size, kind) if prices is not None else (),
    )


def _forecast(planner: MixedPlanner, decision: Decision, kind: ScheduleKind | None) -> Forecast:
    first = planner.profile_of(decision.plan.nodes[0])
    return forecast(first, decision.plan, kind=kind, profile_of=planner.profile_of)


def _without_mixing(planner: MixedPlanner, kind_of: Mapping[str, str], chosen: Decision) -> str:
    """Say in a sentence what pipelines with nodes of one kind each would do."""
    subject = "pipelines with nodes of one kind each"
    if all(len({kind_of[node] for node in pipeline.nodes}) == 1 for pipeline in chosen.plan.pipelines):
        return f"these are {subject}; mixing them saves nothing"
    apart = MixedPlanner(planner.kinds, planner.settings, kind_of, mixes=False)
    try:
        other = apart.initial_plan(list(kind_of))
    except PlanningError:
        return f"{subject} cannot hold the model"
    share = other.predicted_step_s / chosen.predicted_step_s - 1
    fewer = len(other.plan.pipelines) < min(len(chosen.plan.pipelines), planner.settings.fault_threshold + 1)
    return f"{subject} would take {100 * share:.1f} % longer a step" + (", with fewer copies" if fewer else "")


def _priced(
    planner: MixedPlanner,
    names: Sequence[str],
    found: Forecast,
    prices: Mapping[str, float],
    global_batch_size: int,
    kind: ScheduleKind | None,
) -> tuple[Priced, ...]:
    """Say what all nodes train for their price, and those that train the most for theirs."""

    def priced(nodes: Sequence[str], step_s: float) -> Priced:
        own = [planner.kind_of(node) for node in nodes]
        dollars_per_h = sum(prices[each] for each in own)
        return Priced(
            nodes={each.name: own.count(each.name) for each in planner.kinds},
            dollars_per_h=dollars_per_h,
            step_s=step_s,
            samples_per_dollar=global_batch_size / (step_s * dollars_per_h / 3600),
        )

    answers = [priced(names, found.step_s)]
    cheapest = planner.cheapest_nodes(names, prices)
    if cheapest is not None and len(cheapest) < len(names):
        fewer = planner.initial_plan(cheapest)
        answers.append(priced(cheapest, _forecast(planner, fewer, kind).step_s))
    return tuple(answers)
