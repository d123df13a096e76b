"""A run as one self-contained HTML page: what it did over time, what went wrong, and what that cost.

Every text from elsewhere (names, errors, reasons) is escaped; the page has no script.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from html import escape

from oobleck.control import journal
from oobleck.planner import Pipeline
from oobleck.planner.formatting import counted
from oobleck.ui import formatting

from .axes import time_ticks
from .report_charts import Marker, Series, chart
from .report_sections import checkpoint_section, job_section, step_sections
from .report_style import STYLE

_MAX_ROWS = 200
_MAX_NODES = 16

_CALM = frozenset(cause for cause in journal.PlanCause if cause.is_calm)
_OF_SAVES = ("loss", "step time", "goodput", "steps lost")
_COMMAND = re.compile(r"`([^`]+)`")
_STATE_COLOURS = {journal.RunState.DONE: "well", journal.RunState.STOPPED: "on", journal.RunState.FAILED: "failed"}
_STATE_WORDS = {
    "useful": "useful steps",
    "redone": "steps made again",
    "reconfiguring": "recovering",
    "degraded": "slower than the best plan",
    "idle": "too few nodes",
    "starting": "starting",
    "checkpoint": "saving",
    "stopping": "stopping",
}


def report_html(
    history: journal.History,
    summary: journal.Summary,
    incidents: Iterable[journal.Incident],
    *,
    has_master: bool = True,
) -> str:
    """Write the page. The cost is in proportion to its sections, whose length is bounded.

    `has_master` tells of a run without an end whether a master leads it.
    """
    title = f"Oobleck: {summary.tag or 'a run'}"
    started = history.started or history.script
    version = f" {escape(started.version)}" if started else ""
    body = "".join(
        (
            _header(history, summary, has_master=has_master),
            _time(history, summary) if history.script is None or summary.steps_committed else "",
            _throughput(history, summary),
            step_sections(history),
            _incidents(tuple(incidents)),
            _recoveries(summary.recoveries),
            checkpoint_section(history),
            _plans(history),
            _generations(history),
            job_section(history),
            f"<footer>Oobleck{version}; times are counted from the start of the run.</footer>",
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _header(history: journal.History, summary: journal.Summary, *, has_master: bool) -> str:
    started = history.started or history.script
    facts, what = _job_facts(summary), ""
    if history.script is not None:
        facts, what = _script_facts(history, summary), history.script.run.kinds
    elif history.started is not None:
        what = history.started.job.model.type
    if started is not None:
        what += f" on {counted(len(started.nodes), 'node')}, started {_moment_text(started.started_at)}"
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return (
        f"<header><h1>{escape(summary.tag)}</h1><p>{escape(what)}</p>"
        f'{_state(history, summary, has_master=has_master)}<dl class="facts">{items}</dl></header>'
    )


def _job_facts(summary: journal.Summary) -> tuple[tuple[str, str], ...]:
    return (
        ("steps", formatting.steps_text(summary)),
        ("loss", f"{summary.losses[-1]:.4f}" if summary.losses else "–"),
        ("tokens/s", formatting.count_text(summary.tokens_per_s)),
        ("step time", formatting.seconds_text(summary.step_time_s.median if summary.step_time_s else None)),
        ("goodput", formatting.percent_text(summary.goodput)),
        ("elapsed", formatting.duration_text(summary.elapsed_s)),
        ("recoveries", formatting.recoveries_text(summary)),
        ("steps lost", formatting.count_text(summary.steps_lost)),
    )


def _script_facts(history: journal.History, summary: journal.Summary) -> tuple[tuple[str, str], ...]:
    newest = history.generations[-1] if history.generations else None
    facts = _job_facts(summary)
    saved = [("steps", formatting.count_text(summary.last_step)), *(each for each in facts if each[0] in _OF_SAVES)]
    return (
        *(saved if summary.steps_committed else ()),  # else only the script itself knows its steps
        ("generations", formatting.count_text(history.num_generations)),
        ("ranks", formatting.count_text(newest.world_size if newest else 0)),
        ("elapsed", formatting.duration_text(summary.elapsed_s)),
    )


def _state(history: journal.History, summary: journal.Summary, *, has_master: bool) -> str:
    if summary.exit_code is None and not has_master:
        kind, text = "failed", f"has lost its master; `oobleck resume {summary.tag}` takes it over"
    elif summary.exit_code is None:
        kind, text = "on", "continues"
    else:
        is_whole = history.script is not None or summary.last_step >= summary.max_steps
        kind = _STATE_COLOURS[journal.state_at_end(summary.exit_code, is_whole=is_whole)]
        text = summary.reason.splitlines()[0] if summary.reason else "ended"
    return f'<p class="state {kind}">{_with_commands(text)}</p>'


def _with_commands(text: str) -> str:
    """Return a text as HTML, with commands between backticks as code."""
    return _COMMAND.sub(r"<code>\1</code>", escape(text))


def _moment_text(moment: str) -> str:
    try:
        return f"{datetime.fromisoformat(moment).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return moment


def _time(history: journal.History, summary: journal.Summary) -> str:
    split = history.split
    states = {"useful": split.useful_s, **split.downtime_s}
    shown = [(state, seconds) for state, seconds in states.items() if seconds > 0]
    whole_s = sum(seconds for _, seconds in shown)
    if not whole_s:
        return ""
    bars = "".join(
        f'<i class="{state}" style="width:{100 * seconds / whole_s:.3f}%" title="{escape(_STATE_WORDS[state])}"></i>'
        for state, seconds in shown
    )
    legend = "".join(
        f'<li><i class="{state}"></i>{escape(_STATE_WORDS[state])}: {formatting.seconds_text(seconds)} '
        f"({formatting.percent_text(seconds / whole_s)})</li>"
        for state, seconds in shown
    )
    nodes = summary.node_hours
    hours = (
        f"<p>Node-hours: {escape(formatting.node_hours_text(nodes))}.</p>" if nodes is not None and nodes.there else ""
    )
    return (
        f'<section><h2>Where the time went</h2><div class="bar">{bars}</div><ul class="legend">{legend}</ul>'
        f"{hours}</section>"
    )


def _throughput(history: journal.History, summary: journal.Summary) -> str:
    if not history.rates:
        return ""
    until_s = history.elapsed_s
    rates = [point for since, until, rate in history.rates for point in ((since, rate), (until, rate))]
    nodes = _as_steps(history.num_nodes, until_s)
    markers = [
        Marker(
            x=done.t_s,
            text=f"{formatting.duration_text(done.t_s)} {_recovery_text(done)}",
            label=_names_text(done.nodes, 1) or done.cause.replace("_", " "),
            is_calm=done.cause in _CALM,
        )
        for done in summary.recoveries[:_MAX_ROWS]
    ]
    over_time = partial(
        chart,
        x_range=(0.0, until_s),
        x_ticks=time_ticks(0.0, until_s, 4),
        x_text=formatting.duration_text,
        markers=markers,
    )
    rate_chart = over_time(
        [Series(points=rates, style="rate", is_area=True)],
        title="tokens per second over time",
        values=[
            (since, f"{formatting.duration_text(since)}: {formatting.count_text(rate)} tokens/s")
            for since, _, rate in history.rates
        ],
        y_max=1.05 * max(rate for _, rate in rates),
        y_text=formatting.count_text,
    )
    node_chart = over_time(
        [Series(points=nodes, style="nodes", is_area=True)],
        title="nodes that train over time",
        y_max=1.15 * max((count for _, count in nodes), default=1),
        y_text=lambda value: f"{value:g}" if value == int(value) else "",
    )
    return (
        "<section><h2>Throughput and nodes</h2>"
        f'<p class="caption">tokens/s; dashed lines are recoveries, grey where no node was lost</p>{rate_chart}'
        f'<p class="caption">nodes that train</p>{node_chart}</section>'
    )


def _as_steps(changes: Iterable[tuple[float, int]], until_s: float) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for t_s, count in changes:
        if points:
            points.append((t_s, points[-1][1]))
        points.append((t_s, float(count)))
    if points:
        points.append((until_s, points[-1][1]))
    return points


def _incidents(incidents: tuple[journal.Incident, ...]) -> str:
    if not incidents:
        return "<section><h2>What went wrong</h2><p>Nothing.</p></section>"
    shown = "".join(_incident(incident) for incident in incidents[-_MAX_ROWS:])
    return f"<section><h2>What went wrong</h2>{_left_out(len(incidents), _MAX_ROWS)}{shown}</section>"


def _incident(incident: journal.Incident) -> str:
    then = "\n".join(f"{found.node}: {found.text}" if found.node else found.text for found in incident.consequences)
    lost = "1 step lost" if incident.steps_lost == 1 else f"{incident.steps_lost or 'no'} steps lost"
    rows = (
        ("because", f"{incident.root.text}\n{incident.root.detail}".strip()),
        ("then", then),
        ("done", "\n".join(response.text for response in incident.responses)),
        ("cost", f"{formatting.seconds_text(incident.stall_s)} without progress, {lost}"),
        ("to do", incident.advice),
    )
    items = "".join(f"<dt>{name}</dt><dd>{_with_commands(text)}</dd>" for name, text in rows if text)
    when = formatting.duration_text(incident.root.t_s)
    return f'<div class="incident"><h3>{when} {escape(incident.title)}</h3><dl>{items}</dl></div>'


def _recoveries(recoveries: tuple[journal.RecoverySummary, ...]) -> str:
    if not recoveries:
        return ""
    headers = ("detect", "decide", "copy", "stall", "moved", "redone")
    head = "<th>at</th><th>what</th>" + "".join(f'<th class="num">{name}</th>' for name in headers)
    rows = [
        f'<td>{formatting.duration_text(done.t_s)}</td><td class="what">{escape(_recovery_text(done))}</td>'
        + "".join(
            f'<td class="num" data-name="{name}">{escape(text)}</td>'
            for name, text in zip(headers, _recovery_costs(done), strict=True)
        )
        for done in recoveries[-_MAX_ROWS:]
    ]
    title = f"<h2>Recoveries and planned changes</h2>{_left_out(len(recoveries), _MAX_ROWS)}"
    return f"<section>{title}{_table(head, rows, style='recoveries')}</section>"


def _table(head: str, rows: Iterable[str], *, style: str) -> str:
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _recovery_costs(done: journal.RecoverySummary) -> tuple[str, ...]:
    seconds = (done.detect_s, done.decide_s, done.transfer_s, done.stall_s)
    return (
        *map(formatting.seconds_text, seconds),
        formatting.bytes_text(done.bytes_moved),
        str(done.microbatches_redone),
    )


def _recovery_text(done: journal.RecoverySummary) -> str:
    names = _names_text(done.nodes, 4)
    what = f"{done.cause.replace('_', ' ')}; {journal.Action(done.action).words}"
    return f"{names}: {what}" if names else what


def _names_text(nodes: tuple[str, ...], most: int) -> str:
    more = f" and {len(nodes) - most} more" if len(nodes) > most else ""
    return ", ".join(nodes[:most]) + more


def _plans(history: journal.History) -> str:
    shown = history.plans
    if not shown:
        return ""
    items = "".join(_plan(plan, is_open=plan is shown[-1]) for plan in shown)
    return f"<section><h2>Plans</h2>{_left_out(history.num_plans, len(shown))}{items}</section>"


def _plan(adopted: journal.PlanAdopted, *, is_open: bool) -> str:
    pipelines = "".join(_pipeline(index, pipeline) for index, pipeline in enumerate(adopted.plan.pipelines))
    spares = f'<p class="caption">spare: {escape(", ".join(adopted.plan.spares))}</p>' if adopted.plan.spares else ""
    warning = "" if adopted.redundant else " (some layer has fewer than f + 1 copies)"
    return (
        f"<details{' open' if is_open else ''}><summary>"
        f"{formatting.duration_text(adopted.t_s)} generation {adopted.generation}: "
        f"{escape(adopted.reason + warning)}</summary>"
        f'<p class="caption">predicted step: {formatting.seconds_text(adopted.predicted_step_s)}</p>'
        f'<div class="scroll">{pipelines or "no pipeline: too few nodes"}</div>{spares}</details>'
    )


def _generations(history: journal.History) -> str:
    if not history.generations:
        return ""
    rows = (
        f"<td>{formatting.duration_text(formed.t_s)}</td><td>{formed.generation}: "
        f"{escape(formed.cause.value.replace('_', ' '))}</td><td>{escape(_ranks_text(formed.nodes))}</td>"
        for formed in history.generations
    )
    left_out = _left_out(history.num_generations, len(history.generations))
    table = _table("<th>at</th><th>generation</th><th>ranks</th>", rows, style="generations")
    return f"<section><h2>Generations</h2>{left_out}{table}</section>"


def _ranks_text(nodes: tuple[journal.NodeRanks, ...]) -> str:
    parts = [
        f"{each.node}: {formatting.layers_text(each.first_rank, each.first_rank + each.num_ranks)}" for each in nodes
    ]
    return _names_text(tuple(parts), _MAX_NODES)


def _pipeline(index: int, pipeline: Pipeline) -> str:
    stages = "".join(
        f'<div class="stage" style="flex-grow:{len(stage.layers)}">{escape(stage.worker_ids[0].node)}'
        f"<small>layers {formatting.chunks_text((each.start, each.stop) for each in stage.chunks)}</small></div>"
        for stage in pipeline.stages
    )
    title = f"<b>pipeline {index}, {pipeline.num_microbatches} microbatches</b>"
    return f'<div class="pipeline">{title}{stages}</div>'


def _left_out(count: int, shown: int) -> str:
    return f'<p class="caption">the first {count - shown} are left out</p>' if count > shown else ""
