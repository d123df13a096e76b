"""A plan with its consequences, made and shown: what `oobleck plan` and dry runs have in common."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Console

from oobleck.planner import Decision, Planner
from oobleck.planner.alternatives import explain_num_pipelines, pipeline_alternatives
from oobleck.planner.what_if import what_if_one_is_lost, what_if_two_are_lost
from oobleck.schedule import ScheduleKind
from oobleck.schedule.forecast import forecast
from oobleck.ui.plan_json import plan_json
from oobleck.ui.plan_report import AfterLosing, PlanReport, TemplateRow, plan_report

MAX_CASES = 64
"""Kinds of losses that are decided, for one node lost and for two; more are sampled."""


def make_report(
    planner: Planner,
    names: Sequence[str],
    *,
    global_batch_size: int,
    kind: ScheduleKind | None,
    lost: tuple[str, ...] = (),
    utilisation: tuple[float, float] | None = None,
) -> PlanReport:
    """Plan for the nodes named, and decide what losses would lead to.

    Without a `kind`, pipelines choose between 1F1B, zero-bubble and several chunks. `lost` are the nodes whose loss is
    asked about, `utilisation` is (operations of one step, peak operations a second of one device) where they are known.
    Raises PlanningError where there is no plan.
    """
    profile, settings = planner.profile, planner.settings
    decision = planner.initial_plan(names)
    model_flops, peak_flops_per_s = utilisation or (None, None)
    alternatives = pipeline_alternatives(planner, names, decision)
    return PlanReport(
        profile=profile,
        num_nodes=len(names),
        devices_per_node=settings.devices_per_node,
        fault_threshold=settings.fault_threshold,
        global_batch_size=global_batch_size,
        decision=decision,
        forecast=forecast(profile, decision.plan, kind=kind),
        why=explain_num_pipelines(planner, decision, alternatives),
        templates=_template_rows(planner, len(names)),
        losses=(
            what_if_one_is_lost(planner, decision.plan, max_cases=MAX_CASES),
            *((what_if_two_are_lost(planner, decision.plan, max_cases=MAX_CASES),) if len(names) > 1 else ()),
        ),
        after=_after(planner, decision, kind, lost) if lost else None,
        model_flops=model_flops,
        peak_flops_per_s=peak_flops_per_s,
    )


def _after(planner: Planner, decision: Decision, kind: ScheduleKind | None, lost: tuple[str, ...]) -> AfterLosing:
    after = planner.reconfigure(decision.plan, lost=lost)
    return AfterLosing(lost=lost, decision=after, forecast=forecast(planner.profile, after.plan, kind=kind))


def _template_rows(planner: Planner, num_nodes: int) -> tuple[TemplateRow, ...]:
    rows = []
    for size, template in planner.templates(num_nodes).items():
        first_s = planner.template_step_s(size, 1)
        next_s = planner.template_step_s(size, 2) - first_s
        rows.append(TemplateRow(template=template, first_s=first_s, next_s=next_s))
    return tuple(rows)


def show_report(report: PlanReport, *, as_json: bool) -> None:
    """Print the report, for a person or for a program."""
    if as_json:
        typer.echo(plan_json(report), nl=False)
        return
    console = Console()
    console.print(plan_report(report, width=console.width))
