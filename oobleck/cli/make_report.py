"""Makes and shows a plan with its consequences, for `oobleck plan` and dry runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer
from rich.console import Console

from oobleck.planner import Decision, Planner
from oobleck.planner.what_if import explain_pipelines, what_if_lost
from oobleck.schedule import ScheduleKind
from oobleck.schedule.forecast import Forecast, forecast
from oobleck.ui.plan_json import plan_json
from oobleck.ui.plan_report import AfterLosing, PlanReport, Priced, TemplateRow, plan_report

_MAX_CASES = 64  # kinds of losses that are decided, each for one node and for two; of more, a sample is


def make_report(
    planner: Planner,
    names: Sequence[str],
    *,
    global_batch_size: int,
    kind: ScheduleKind | None,
    num_lanes: int = 1,
    context_parallel: int = 1,
    choices: tuple[tuple[str, float | None], ...] = (),
    lost: tuple[str, ...] = (),
    utilisation: tuple[float, float] | None = None,
    prices: Mapping[str, float] | None = None,
) -> PlanReport:
    """Plan for the nodes of these names, and decide what losses would lead to.

    The devices of a sharded stage take `num_lanes` microbatches at once, `context_parallel` of them each.
    `choices` are the ways to share them out between which `planner` was chosen, with the seconds of a step.
    Without a `kind`, pipelines choose between 1F1B, zero-bubble and several chunks. `lost` are the nodes whose loss the
    user asks about, `utilisation` is (operations of one step, peak operations a second of one device), if known, and
    `prices` are dollars an hour for a node of each kind. Raises PlanningError if there is no plan.
    """
    decision = planner.initial_plan(names)
    after = planner.reconfigure(decision.plan, lost=lost) if lost else None
    model_flops, peak_flops_per_s = utilisation or (None, None)
    several = len(planner.kinds) > 1
    kind_of = {node: planner.kind_of(node) for node in names} if several else {}
    counts = [(each, sum(kind == each.name for kind in kind_of.values())) for each in planner.kinds]
    return PlanReport(
        profile=planner.profile_of(names[0]),
        num_nodes=len(names),
        devices_per_node=max(each.devices_per_node for each in planner.kinds),
        kinds=tuple((each.name, number, each.devices_per_node) for each, number in counts) if several else (),
        kind_of=kind_of,
        fault_threshold=planner.settings.fault_threshold,
        global_batch_size=global_batch_size,
        num_lanes=num_lanes,
        context_parallel=context_parallel,
        choices=choices,
        decision=decision,
        forecast=_forecast(planner, decision, kind),
        why=explain_pipelines(planner, names, decision),
        templates=_template_rows(planner, len(names)),
        losses=tuple(
            what_if_lost(planner, decision.plan, number, max_cases=_MAX_CASES)
            for number in ((1, 2) if len(names) > 1 else (1,))
        ),
        after=None
        if after is None
        else AfterLosing(lost=lost, decision=after, forecast=_forecast(planner, after, kind)),
        model_flops=model_flops,
        peak_flops_per_s=peak_flops_per_s,
        priced=() if prices is None else _priced(planner, names, decision, prices, global_batch_size, kind),
    )


def first_step(planner: Planner, names: Sequence[str], kind: ScheduleKind | None) -> tuple[bool, float]:
    """Return whether the first plan for these nodes keeps f + 1 copies, and its seconds a step as a report has them."""
    decision = planner.initial_plan(names)
    return decision.redundant, _forecast(planner, decision, kind).step_s


def _forecast(planner: Planner, decision: Decision, kind: ScheduleKind | None) -> Forecast:
    profile_of = planner.profile_of if len(planner.kinds) > 1 else None
    return forecast(planner.profile_of(decision.plan.nodes[0]), decision.plan, kind=kind, profile_of=profile_of)


def _template_rows(planner: Planner, num_nodes: int) -> tuple[TemplateRow, ...]:
    rows = []
    for size, template in planner.templates(num_nodes).items():
        first_s = planner.template_step_s(size, 1)
        rows.append(TemplateRow(template, first_s, planner.template_step_s(size, 2) - first_s))
    return tuple(rows)


def _priced(
    planner: Planner,
    names: Sequence[str],
    chosen: Decision,
    prices: Mapping[str, float],
    global_batch_size: int,
    kind: ScheduleKind | None,
) -> tuple[Priced, ...]:
    """Return what all nodes train for their price, and then the nodes that train the most for theirs."""

    def priced(nodes: Sequence[str], decision: Decision) -> Priced:
        own = [planner.kind_of(node) for node in nodes]
        dollars_per_h, step_s = sum(prices[each] for each in own), _forecast(planner, decision, kind).step_s
        return Priced(
            nodes={each.name: own.count(each.name) for each in planner.kinds},
            dollars_per_h=dollars_per_h,
            step_s=step_s,
            samples_per_dollar=global_batch_size / (step_s * dollars_per_h / 3600),
        )

    answers = [priced(names, chosen)]
    cheapest = planner.cheapest_nodes(names, prices)
    if cheapest is not None and len(cheapest) < len(names):
        answers.append(priced(cheapest, planner.initial_plan(cheapest)))
    return tuple(answers)


def show_report(report: PlanReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(plan_json(report), nl=False)
        return
    console = Console()
    console.print(plan_report(report, width=console.width))
