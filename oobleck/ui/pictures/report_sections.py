"""Sections of a report that need no other's values: each step's numbers, checkpoints, and the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape

from oobleck.control import journal
from oobleck.job import JobSpec
from oobleck.ui import formatting

from .report_charts import Series, chart

_SMOOTHED_FROM = 20
"""With fewer points a smooth line would hide what they are."""
_SPAN_SHARE = 0.05
_MAX_CHARS = 300


def step_sections(history: journal.History) -> str:
    """Draw the loss of each step, and below it the learning rate and the gradient norm."""
    parts = []
    if len(history.losses) > 1:
        raw = Series(points=history.losses, style="loss raw")
        is_smoothed = len(history.losses) >= _SMOOTHED_FROM
        series = (
            [raw, Series(points=smoothed(history.losses), style="loss")]
            if is_smoothed
            else [Series(points=history.losses, style="loss")]
        )
        caption = "by step, and smoothed" if is_smoothed else "by step"
        parts.append(_section("Loss", (caption, _by_step(series, history.losses, "loss"))))
    if len(history.grad_norms) > 1:
        rates, norms = history.learning_rates, history.grad_norms
        parts.append(
            _section(
                "Learning rate and gradients",
                ("learning rate", _by_step([Series(points=rates, style="lr")], rates, "learning rate")),
                ("norm of the gradients", _by_step([Series(points=norms, style="norm")], norms, "norm")),
            )
        )
    return "".join(parts)


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return exponential means of the values, over about a twentieth of the points; the first ones weigh in full."""
    keep = 1 - 1 / max(1.0, _SPAN_SHARE * len(points))
    total = weight = 0.0
    means = []
    for x, y in points:
        total, weight = keep * total + y, keep * weight + 1
        means.append((x, total / weight))
    return means


def _by_step(series: Sequence[Series], values: Sequence[tuple[float, float]], name: str) -> str:
    low, high = min(y for _, y in values), max(y for _, y in values)
    # A constant value needs a range too.
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 0.5
    return chart(
        series,
        title=f"{name} over steps",
        x_range=(values[0][0], values[-1][0]),
        y_min=low - margin,
        y_max=high + margin,
        x_text=formatting.count_text,
        y_text=lambda value: f"{value:.3g}",
        values=[(x, f"step {formatting.count_text(x)}: {name} {y:.5g}") for x, y in values],
    )


def checkpoint_section(history: journal.History) -> str:
    """List the newest checkpoints."""
    if not history.checkpoints:
        return ""
    head = "".join(f'<th class="num">{name}</th>' for name in ("step", "at", "size", "pause", "disk"))
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td class="num">{escape(text)}</td>'
            for text in (
                formatting.count_text(saved.step),
                formatting.duration_text(saved.t_s),
                formatting.bytes_text(saved.size_bytes),
                formatting.seconds_text(saved.pause_s),
                formatting.seconds_text(saved.duration_s),
            )
        )
        + "</tr>"
        for saved in history.checkpoints
    )
    left = history.num_checkpoints - len(history.checkpoints)
    note = f'<p class="caption">the newest {len(history.checkpoints)} of {history.num_checkpoints}</p>' if left else ""
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f"<section><h2>Checkpoints</h2>{note}{table}</section>"


def job_section(history: journal.History) -> str:
    """Show what of the job is not the default, the nodes, and where logs are."""
    started = history.started or history.script
    if started is None:
        return ""
    nodes = ", ".join(node.name for node in started.nodes)
    tag = started.job.tag if isinstance(started, journal.JobStarted) else started.run.tag
    facts = {"Oobleck": started.version, "nodes": nodes, "logs": f"oobleck logs --tag {tag}"}
    if isinstance(started, journal.JobStarted):
        facts |= dict(_changed(asdict(started.job), asdict(JobSpec())))
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + '…')}</dd>"
        for name, text in facts.items()
    )
    return f'<section><h2>Job</h2><dl class="job">{items}</dl></section>'


def _changed(values: object, defaults: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys whose values differ from the defaults; the model's type always."""
    if isinstance(values, Mapping) and isinstance(defaults, Mapping) and name != "model.config":
        for key, value in values.items():
            yield from _changed(value, defaults.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(values, Mapping):
        yield name, ", ".join(f"{key}: {value}" for key, value in values.items())
    elif values != defaults or name == "model.type":
        yield name, str(values)


def _section(title: str, *charts: tuple[str, str]) -> str:
    body = "".join(f'<p class="caption">{escape(caption)}</p>{drawn}' for caption, drawn in charts)
    return f"<section><h2>{escape(title)}</h2>{body}</section>"
