"""The course of a run over time, as values that all drawings of it share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oobleck.control.journal import Summary
from oobleck.sim.costs import Outcome
from oobleck.sim.trace import Trace

ACTIVITIES: Mapping[str, tuple[str, str]] = {
    "training": ("training", "#4c78a8"),
    "redoing": ("steps done again", "#f2a541"),
    "recovering": ("recovering", "#d62728"),
    "checkpoint": ("checkpoints", "#b279a2"),
    "starting": ("starting", "#79706e"),
    "idle": ("too few nodes", "#bab0ac"),
}
"""Keyed by activity: words and a colour. Colour-blind people can distinguish them, and so can print, by brightness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    start_s: float
    stop_s: float
    activity: str
    """A key of ACTIVITIES."""
    samples_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPanel:
    name: str
    about: str
    duration_s: float
    bands: Sequence[Band]
    num_nodes: Sequence[tuple[float, int]]
    """(seconds, number of nodes from then on)."""
    samples_per_s: float
    """Committed samples, divided by the whole time."""
    summary: Summary


def panel_of(outcome: Outcome, trace: Trace) -> RunPanel:
    """Return the course of a simulated run; a job may continue after the trace's end, which is left out."""
    bands = [
        Band(
            start_s=each.start_s,
            stop_s=min(each.stop_s, trace.duration_s),
            activity=each.activity.value,
            samples_per_s=each.samples_per_s,
        )
        for each in outcome.stretches
        if each.start_s < trace.duration_s
    ]
    return RunPanel(
        name=outcome.policy,
        about=outcome.about,
        duration_s=trace.duration_s,
        bands=bands,
        num_nodes=trace.counts,
        samples_per_s=outcome.samples_per_s,
        summary=outcome.summary,
    )


def column_means(points: Sequence[tuple[float, float]], duration_s: float, columns: int) -> list[float]:
    """Return the mean over each of `columns` equal parts of the time; O(points + columns)."""
    sums = [0.0] * columns
    each_s = duration_s / columns
    for (since_s, value), (until_s, _) in pairwise([*points, (duration_s, 0.0)]):
        first, last = int(since_s / each_s), min(columns - 1, int(until_s / each_s))
        for column in range(first, last + 1) if value else ():
            inside_s = min(until_s, (column + 1) * each_s) - max(since_s, column * each_s)
            sums[column] += value * max(0.0, inside_s)
    return [total / each_s for total in sums]
