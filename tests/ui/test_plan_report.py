from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from oobleck.planner import Planner, PlannerSettings, Profile
from oobleck.planner.what_if import what_if_lost
from oobleck.schedule.forecast import forecast
from oobleck.ui.plan_report import PlanReport, TemplateRow, figures_of, plan_report
from tests.planner.simple_profiles import make_profile, node_names


def make_report(profile: Profile, num_nodes: int, *, max_cases: int = 64, **settings: int) -> PlanReport:
    planner = Planner(profile, PlannerSettings(**settings))
    decision = planner.initial_plan(node_names(num_nodes))
    return PlanReport(
        profile=profile,
        num_nodes=num_nodes,
        devices_per_node=1,
        fault_threshold=planner.settings.fault_threshold,
        global_batch_size=planner.settings.num_microbatches * profile.microbatch_size,
        decision=decision,
        forecast=forecast(profile, decision.plan),
        why="because",
        templates=tuple(
            TemplateRow(template=template, first_s=3.0, next_s=1.0)
            for template in planner.templates(num_nodes).values()
        ),
        losses=(
            what_if_lost(planner, decision.plan, 1, max_cases=max_cases),
            what_if_lost(planner, decision.plan, 2, max_cases=max_cases),
        ),
    )


def show(report: PlanReport, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(plan_report(report, width=width))
    return console.file.getvalue()


def test_many_templates_and_losses_are_cut_short_and_said_to_be():
    report = make_report(make_profile([1.0] * 30), 24, num_microbatches=48, num_pipelines=2, max_cases=5)
    shown = show(report)
    assert len(report.templates) == 24
    assert "18 of 24 templates; --json has all" in shown
    assert [len(pipeline.nodes) for pipeline in report.decision.plan.pipelines] == [15, 9]
    assert "a sample: 5 of 24 kinds of losses" in shown
    assert f"a sample: 5 of {24 * 23 // 2} kinds of losses" in shown


def test_a_template_in_use_is_never_cut():
    report = make_report(make_profile([1.0] * 30), 26, num_microbatches=48, num_pipelines=2)
    used = {pipeline.template.num_nodes for pipeline in report.decision.plan.pipelines}
    shown = show(report)
    for size in used:
        assert f"→ {size}" in shown


def test_pipelines_of_one_kind_share_a_row_and_spares_have_theirs():
    report = make_report(make_profile([1.0] * 2), 9, num_microbatches=10, num_pipelines=4)
    lines = show(report).splitlines()
    assert any(line.split() == ["0-1", "2", "2", "3", "12.2", "s", "25.0", "%"] for line in lines)
    assert any(line.split()[:4] == ["2-3", "2", "2", "2"] for line in lines)
    assert any(line.split() == ["spares", "1"] for line in lines)


def test_an_estimate_is_labelled_as_such():
    report = make_report(replace(make_profile([1.0] * 4), estimated=True), 2, num_microbatches=8)
    assert "estimated from data sheets, not measured" in show(report)
    assert "estimated" not in show(replace(report, profile=replace(report.profile, estimated=False)))


def test_the_share_of_the_peak_counts_all_devices_of_all_nodes():
    report = make_report(make_profile([1.0] * 4), 4, num_microbatches=8)
    assert report.mfu is None
    assert "MFU" not in show(report)
    known = replace(report, model_flops=8e12 * report.forecast.step_s, peak_flops_per_s=1e13)
    assert known.mfu == pytest.approx(0.2)
    assert "MFU 20.0 %" in show(known)


def test_stages_with_hardly_any_memory_left_stand_out():
    profile = make_profile([1.0, 1.0], memory_bytes=805 * 10**6)
    report = make_report(profile, 2, num_microbatches=4)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    console.print(plan_report(report, width=100))
    assert "\x1b[31m" in console.file.getvalue()


def test_figures_name_their_pipelines_and_stages():
    report = make_report(make_profile([1.0] * 4), 2, num_microbatches=8, num_pipelines=1)
    (figure,) = figures_of(report.forecast)
    assert figure.title == "1 × 2 nodes, 8 microbatches"
    assert figure.labels == ("0: 0-1", "1: 2-3")
