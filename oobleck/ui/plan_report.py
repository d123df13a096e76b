"""A plan for people: its pipelines, their speed, and what failures would do to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oobleck.control.journal import Action
from oobleck.control.protocol import runs_of
from oobleck.planner import Decision, PipelineTemplate, Profile, StageTemplate
from oobleck.planner.what_if import LossCase, LossReport, moved_bytes, transfer_s
from oobleck.schedule import ScheduleKind
from oobleck.schedule.forecast import Forecast, PipelineForecast, StageMemory

from .formatting import bytes_text, chunks_text, count_text, percent_text, seconds_text
from .timeline import Figure, timeline_lines

_MAX_TEMPLATES = 16


class TemplateRow(NamedTuple):
    """A template, with the seconds of a pipeline's first microbatch, there and back, and of each further one."""

    template: PipelineTemplate
    first_s: float
    next_s: float


class AfterLosing(NamedTuple):
    lost: tuple[str, ...]
    decision: Decision
    forecast: Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    nodes: Mapping[str, int]
    dollars_per_h: float
    step_s: float
    samples_per_dollar: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    profile: Profile
    num_nodes: int
    devices_per_node: int
    fault_threshold: int
    global_batch_size: int
    decision: Decision
    forecast: Forecast
    why: str
    """The reason for the number of pipelines."""
    templates: tuple[TemplateRow, ...]
    losses: tuple[LossReport, ...]
    after: AfterLosing | None = None
    model_flops: float | None = None
    """Floating-point operations of the model in one step; None if unknown."""
    num_lanes: int = 1
    """The microbatches that the devices of a sharded stage take at once."""
    context_parallel: int = 1
    """The devices that take each of them."""
    choices: tuple[tuple[str, float | None], ...] = ()
    """The ways to share out a node's devices that were tried, and a step's seconds; None where there is no plan."""
    peak_flops_per_s: float | None = None
    """The peak of one device; None if unknown."""
    kinds: tuple[tuple[str, int, int], ...] = ()
    """The name, nodes and devices per node of each kind, if there are several kinds."""
    kind_of: Mapping[str, str] = field(default_factory=dict)
    priced: tuple[Priced, ...] = ()
    """All nodes, and then those that train the most for their price, if these are fewer."""

    def kinds_in(self, forecast: Forecast, each: PipelineForecast) -> tuple[str, ...]:
        """Return the kind of each node of such a pipeline; none if all nodes are alike."""
        nodes = forecast.plan.pipelines[each.pipelines[0]].nodes
        return tuple(self.kind_of[node] for node in nodes) if self.kinds else ()

    @property
    def shown(self) -> Forecast:
        """The forecast to draw: of the plan after `--after-losing`, or else of the first plan."""
        return self.forecast if self.after is None else self.after.forecast

    @property
    def tokens_per_s(self) -> float:
        return self.global_batch_size * self.profile.sequence_length / self.forecast.step_s

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the model's operations over what all devices, spares included, could do."""
        if self.model_flops is None or self.peak_flops_per_s is None:
            return None
        devices = self.num_nodes * self.devices_per_node
        return self.model_flops / (self.forecast.step_s * devices * self.peak_flops_per_s)


def plan_report(report: PlanReport, *, width: int) -> RenderableType:
    """Draw a report for a terminal of `width` cells; the timeline is that of the slowest pipeline."""
    slowest = max(report.shown.pipelines, key=lambda each: each.timeline.makespan_s)
    title = Text(f"timeline of the slowest pipeline ({_name(slowest)})", style="bold")
    timeline = timeline_lines(slowest.timeline, width=width, labels=_stage_labels(slowest))
    parts: list[RenderableType] = [
        _headline(report),
        *([_templates(report)] if report.templates else []),
        _pipelines("the plan", report, report.forecast),
        _stages(report, report.forecast),
        *([_prices(report)] if report.priced else []),
        *(_losses(report, losses) for losses in report.losses),
    ]
    if report.after is not None:
        parts += [
            _after(report, report.after),
            _pipelines("the plan after the loss", report, report.after.forecast),
            _stages(report, report.after.forecast),
        ]
    return Group(*parts, Padding(Group(title, *timeline), (1, 0)))


def figures_of(forecast: Forecast) -> tuple[Figure, ...]:
    """Return the timelines of a forecast, named for a picture or a trace."""
    return tuple(
        Figure(title=_name(each), labels=_stage_labels(each), timeline=each.timeline) for each in forecast.pipelines
    )


def _headline(report: PlanReport) -> Text:
    profile, forecast = report.profile, report.forecast
    text = Text()
    cluster = f"{report.num_nodes} nodes of {report.devices_per_node} × {profile.device.name}"
    if report.kinds:
        cluster = " and ".join(
            f"{number} node{'s' if number != 1 else ''} of {devices} × {name.partition('×')[0]}"
            for name, number, devices in report.kinds
        )
    text.append(f"{profile.model} on {cluster}", "bold")
    text.append(
        f"\nbatch {count_text(report.global_batch_size)} in microbatches of {profile.microbatch_size}, "
        f"{count_text(profile.sequence_length)} tokens each, f = {report.fault_threshold}"
    )
    num_devices = report.num_lanes * report.context_parallel
    if num_devices > 1:
        how = "take a microbatch each" if report.context_parallel == 1 else f"each {report.context_parallel} take one"
        text.append(f"\n{num_devices} devices of a node hold each stage, and {how}")
    if report.choices:
        steps = (f"{name} {'no plan' if step_s is None else seconds_text(step_s)}" for name, step_s in report.choices)
        text.append(f"\nsharding, a step: {', '.join(steps)}")
    if profile.estimated:
        text.append("\nestimated from data sheets, not measured", "yellow")
    if "inter_node" in profile.network.assumed:
        text.append(f"\nlinks between nodes are assumed: {profile.network.speed_of('inter_node')}", "yellow")
    else:
        text.append(f"\nlinks between nodes: {profile.network.speed_of('inter_node')}")
    text.append(f"\n\n{seconds_text(forecast.step_s)} a step, {count_text(report.tokens_per_s)} tokens/s", "bold")
    if report.mfu is not None:
        text.append(f", MFU {percent_text(report.mfu)}", "bold")
    text.append(f"; devices wait for {percent_text(forecast.bubble_share)} of it")
    if len(report.decision.plan.pipelines) > 1:
        text.append(f", {seconds_text(forecast.reduce_s)} is the reduction of gradients")
    text.append(f"\n{report.decision.reason.removesuffix('.')}.")
    if not report.decision.redundant:
        text.append(
            f"\nfewer than {report.fault_threshold + 1} copies of each layer: redundancy is below f", "bold red"
        )
    return text.append(f"\n{report.why}.")


def _table(title: str, columns: Sequence[str], *, left: int = 1) -> Table:
    """Return a table whose first `left` columns are words and the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


def _templates(report: PlanReport) -> RenderableType:
    used = {pipeline.template.num_nodes for pipeline in report.decision.plan.pipelines}
    last = len(report.templates) - 1
    rows = report.templates
    if len(rows) > _MAX_TEMPLATES:  # then those in use, and an even choice of the others
        chosen = {number * last // (_MAX_TEMPLATES - 1) for number in range(_MAX_TEMPLATES)}
        rows = tuple(row for index, row in enumerate(rows) if index in chosen or row.template.num_nodes in used)
    table = _table("templates", ("nodes", "stages", "layers", "a microbatch", "the next", "samples/s a node"), left=0)
    for row in rows:
        count = row.template.num_nodes
        rate = report.num_lanes * report.profile.microbatch_size / row.next_s / count
        layers = sorted({len(stage.layers) for stage in row.template.stages})
        table.add_row(
            f"{'→ ' if count in used else ''}{count}",
            str(row.template.num_stages),
            str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}",
            seconds_text(row.first_s),
            seconds_text(row.next_s),
            f"{rate:.3g}",
            style="bold" if count in used else "",
        )
    if len(rows) == len(report.templates):
        return table
    return Group(table, Text(f"{len(rows)} of {len(report.templates)} templates; --json has all", style="dim"))


def _name(each: PipelineForecast) -> str:
    count, nodes = len(each.pipelines), each.template.num_nodes
    node_words = f"{nodes} node{'s' if nodes != 1 else ''}"
    return f"{count} × {node_words}, {each.timeline.schedule.num_microbatches} microbatches"


def _pipelines(title: str, report: PlanReport, forecast: Forecast) -> Table:
    names = [each.timeline.schedule.kind.value for each in forecast.pipelines]
    shows_schedules = set(names) != {ScheduleKind.ONE_F_ONE_B.value}
    columns = ("pipelines", "nodes", "stages", "microbatches", "step", "bubble")
    table = _table(title, (*columns, "schedule") if shows_schedules else columns)
    for name, each in zip(names, forecast.pipelines, strict=True):
        numbers = (
            _forms(report.kinds_in(forecast, each)) or each.template.num_nodes,
            each.template.num_stages,
            each.timeline.schedule.num_microbatches,
        )
        table.add_row(
            _ranges(each.pipelines),
            *map(str, numbers),
            seconds_text(each.timeline.makespan_s),
            percent_text(each.timeline.bubble_share),
            *([name] if shows_schedules else []),
        )
    if forecast.plan.spares:
        table.add_row("spares", str(len(forecast.plan.spares)), "", "", "", "", style="dim")
    return table


def _forms(kinds: Sequence[str]) -> str:
    """Count nodes by kind: 2 A100 + 1 A40."""
    return " + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _prices(report: PlanReport) -> Table:
    table = _table("samples for their price", ("nodes", "$ an hour", "step", "samples a $"))
    for each in report.priced:
        table.add_row(
            " + ".join(f"{number} {kind}" for kind, number in each.nodes.items() if number),
            f"{each.dollars_per_h:.2f}",
            seconds_text(each.step_s),
            f"{each.samples_per_dollar:.4g}",
        )
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers with runs as `0-3, 7`."""
    return chunks_text((first, first + count) for first, count in runs_of(numbers))


def _stages(report: PlanReport, forecast: Forecast) -> RenderableType:
    # Of several pipelines, the one with the most microbatches holds the most activations.
    fullest: dict[tuple[int, tuple[str, ...]], PipelineForecast] = {}
    for each in forecast.pipelines:
        alike = each.template.num_nodes, report.kinds_in(forecast, each)
        if alike not in fullest or min(each.headroom_bytes) < min(fullest[alike].headroom_bytes):
            fullest[alike] = each
    return Group(
        *(
            part
            for (_, kinds), each in sorted(fullest.items(), key=lambda item: item[0])
            for part in (_stage_table(each, kinds), _memory_table(each))
        )
    )


def _stage_table(each: PipelineForecast, kinds: Sequence[str]) -> Table:
    nodes = each.template.num_nodes
    title = f"stages of a pipeline of {_forms(kinds) or nodes} node{'s' if nodes != 1 else ''}"
    columns = ("stage", "layers", "node", "devices", "busy", "memory", "of", "free")
    recomputed = [_recomputed(each.template.chunks_of(index)) for index in range(each.template.num_stages)]
    table = _table(title, (*columns, "blocks that recompute") if any(recomputed) else columns, left=0)
    found = each.timeline
    for index in range(each.template.num_stages):
        stage = each.template.stages[index]
        headroom, available = each.headroom_bytes[index], each.available_bytes[index]
        table.add_row(
            str(index),
            _layers_of(each.template, index),
            f"{stage.node_index} {kinds[stage.node_index]}" if kinds else str(stage.node_index),
            str(stage.num_devices),
            percent_text(found.busy_s[index] / found.makespan_s if found.makespan_s else 0.0),
            bytes_text(found.peak_memory_bytes[index]),
            bytes_text(available),
            Text(percent_text(headroom / available), style="red" if headroom < 0.05 * available else ""),
            *([recomputed[index]] if any(recomputed) else []),
        )
    return table


def _recomputed(chunks: Sequence[StageTemplate]) -> str:
    """Say how many blocks recompute some, and all."""
    counts = {"some": sum(each.num_selective for each in chunks), "all": sum(each.num_recomputed for each in chunks)}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def _memory_table(each: PipelineForecast) -> Table:
    kinds = [each.name for each in fields(StageMemory)]
    table = _table("what is in their memory", ("stage", *kinds), left=0)
    table.collapse_padding = True  # so that each kind's name fits into 80 columns
    for index, memory in enumerate(each.memory):
        table.add_row(str(index), *(bytes_text(getattr(memory, kind)) for kind in kinds))
    return table


def _losses(report: PlanReport, losses: LossReport) -> RenderableType:
    what = "one node" if losses.num_lost == 1 else f"{losses.num_lost} nodes at once"
    columns = ("what happens", "cases", "worst", "step time", "copied", "within")
    table = _table(f"after losing any {what}", columns)
    for action, cases in _by_action(losses.cases):
        table.add_row(action, count_text(sum(case.num_alike for case in cases)), *_worst(report, cases))
    if losses.is_sample:
        note = Text(f"a sample: {len(losses.cases)} of {losses.num_kinds} kinds of losses", style="dim")
        return Group(table, note)
    return table


def _by_action(cases: Sequence[LossCase]) -> Iterator[tuple[Text, list[LossCase]]]:
    def key(case: LossCase) -> tuple[str, bool]:
        if case.decision is None:
            return "cannot continue", False
        return Action(case.decision.action).words, case.decision.redundant

    for action, is_redundant in sorted({key(case) for case in cases}):
        alike = [case for case in cases if key(case) == (action, is_redundant)]
        text = Text(action, style="bold red" if alike[0].decision is None else "")
        if alike[0].decision is not None and not is_redundant:
            text.append(" (redundancy below f)", "yellow")
        yield text, alike


def _worst(report: PlanReport, cases: Sequence[LossCase]) -> tuple[str, str, str, str]:
    decided = [(case, case.decision) for case in cases if case.decision is not None]
    if not decided:
        return " + ".join(cases[0].lost), "–", "–", "–"
    case, slowest = max(decided, key=lambda each: each[1].predicted_step_s)
    # Both are the planner's bounds, so they are comparable.
    change = slowest.predicted_step_s / report.decision.predicted_step_s - 1
    return (
        " + ".join(case.lost),
        f"{100 * change:+.1f} %",
        bytes_text(max(moved_bytes(report.profile, decision.transfers) for _, decision in decided)),
        seconds_text(max(transfer_s(report.profile, decision.transfers) for _, decision in decided)),
    )


def _after(report: PlanReport, after: AfterLosing) -> RenderableType:
    decision = after.decision
    text = Text(f"\nafter losing {', '.join(after.lost)}\n", style="bold")
    text.append(decision.reason.removesuffix(".") + ".\n", "not bold")
    layers = len({transfer.layer for transfer in decision.transfers})
    change = after.forecast.step_s / report.forecast.step_s - 1
    text.append(
        f"{layers} layers are copied, {bytes_text(moved_bytes(report.profile, decision.transfers))} in all, "
        f"{seconds_text(transfer_s(report.profile, decision.transfers))} at full speed; "
        f"then {seconds_text(after.forecast.step_s)} a step ({change:+.1%}).",
        "not bold",
    )
    if not decision.redundant:
        text.append("\nRedundancy is below f.", "bold red")
    return text


def _stage_labels(each: PipelineForecast) -> tuple[str, ...]:
    return tuple(f"{index}: {_layers_of(each.template, index)}" for index in range(each.template.num_stages))


def _layers_of(template: PipelineTemplate, stage: int) -> str:
    return chunks_text((chunk.first_layer, chunk.stop_layer) for chunk in template.chunks_of(stage))
