"""A plan for programs: the report as JSON, with units in the names."""

from __future__ import annotations

import json
from dataclasses import asdict

from oobleck.planner import Decision, Profile
from oobleck.planner.what_if import LossReport, moved_bytes, transfer_s
from oobleck.schedule.forecast import Forecast, PipelineForecast

from .plan_report import PlanReport, TemplateRow

Json = dict[str, object]


def plan_json(report: PlanReport) -> str:
    """Return the report as the text of a JSON document."""
    profile = report.profile
    document: Json = {
        "model": profile.model,
        "device": profile.device.name,
        "estimated": profile.estimated,
        "network": asdict(profile.network),
        "nodes": report.num_nodes,
        "devices_per_node": report.devices_per_node,
        "fault_threshold": report.fault_threshold,
        "global_batch_size": report.global_batch_size,
        "microbatch_size": profile.microbatch_size,
        "sequence_length": profile.sequence_length,
        "tokens_per_s": report.tokens_per_s,
        "mfu": report.mfu,
        "why": report.why,
        "templates": [_template(row) for row in report.templates],
        "plan": _plan(profile, report.decision, report.forecast),
        "losses": [_losses(profile, losses) for losses in report.losses],
        "after_losing": None,
    }
    if report.kinds:
        document["kinds"] = [
            {"name": name, "nodes": number, "devices_per_node": devices} for name, number, devices in report.kinds
        ]
        document["devices_per_node"] = None
        document["device"] = None
    if report.choices:
        document["sharding"] = [{"sharding": name, "step_s": step_s} for name, step_s in report.choices]
    if report.priced:
        document["prices"] = [asdict(each) for each in report.priced]
    if report.after is not None:
        document["after_losing"] = {
            "lost": report.after.lost,
            **_plan(profile, report.after.decision, report.after.forecast),
        }
    return json.dumps(document, indent=2) + "\n"


def _template(row: TemplateRow) -> Json:
    return {
        "nodes": row.template.num_nodes,
        "first_microbatch_s": row.first_s,
        "next_microbatch_s": row.next_s,
        "stages": [
            {
                "first_layer": stage.first_layer,
                "stop_layer": stage.stop_layer,
                "node": stage.node_index,
                "first_device": stage.first_device,
                "devices": stage.num_devices,
            }
            for stage in row.template.stages
        ],
    }


def _plan(profile: Profile, decision: Decision, forecast: Forecast) -> Json:
    kinds = {index: each for each in forecast.pipelines for index in each.pipelines}
    return {
        "action": decision.action,
        "reason": decision.reason,
        "redundant": decision.redundant,
        "step_s": forecast.step_s,
        "planner_bound_s": decision.bound_step_s,
        "reduce_s": forecast.reduce_s,
        "waiting_share": forecast.bubble_share,
        "moved_bytes": moved_bytes(profile, decision.transfers),
        "transfer_s": transfer_s(profile, decision.transfers),
        "pipelines": [
            {"nodes": pipeline.nodes, "microbatches": pipeline.num_microbatches, **_pipeline(kinds[index])}
            for index, pipeline in enumerate(decision.plan.pipelines)
        ],
        "spares": decision.plan.spares,
    }


def _pipeline(each: PipelineForecast) -> Json:
    found = each.timeline
    return {
        "schedule": found.schedule.kind.value,
        "step_s": found.makespan_s,
        "bubble_share": found.bubble_share,
        "stages": [
            {
                "first_layer": stage.first_layer,
                "stop_layer": stage.stop_layer,
                "node": stage.node_index,
                "chunks": [[chunk.first_layer, chunk.stop_layer] for chunk in each.template.chunks_of(index)],
                "devices": stage.num_devices,
                "blocks_recomputing_some": sum(chunk.num_selective for chunk in each.template.chunks_of(index)),
                "blocks_recomputing_all": sum(chunk.num_recomputed for chunk in each.template.chunks_of(index)),
                "busy_s": found.busy_s[index],
                "peak_memory_bytes": found.peak_memory_bytes[index],
                "memory_bytes": asdict(each.memory[index]),
                "available_bytes": each.available_bytes[index],
                "headroom_bytes": each.headroom_bytes[index],
            }
            for index, stage in enumerate(each.template.stages[: each.template.num_stages])
        ],
    }


def _losses(profile: Profile, losses: LossReport) -> Json:
    cases = []
    for case in losses.cases:
        outcome: Json = {"lost": case.lost, "alike": case.num_alike}
        if case.decision is None:
            outcome |= {"action": None, "reason": case.failure}
        else:
            outcome |= {
                "action": case.decision.action,
                "reason": case.decision.reason,
                "redundant": case.decision.redundant,
                "planner_bound_s": case.decision.bound_step_s,
                "moved_bytes": moved_bytes(profile, case.decision.transfers),
                "transfer_s": transfer_s(profile, case.decision.transfers),
                "pipeline_nodes": [len(pipeline.nodes) for pipeline in case.decision.plan.pipelines],
                "spares": len(case.decision.plan.spares),
            }
        cases.append(outcome)
    return {"num_lost": losses.num_lost, "is_sample": losses.is_sample, "kinds": losses.num_kinds, "cases": cases}
