"""The course of a run over time, as values that all drawings of it share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oobleck.control.journal import Summary

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
    """A time in which a run does one thing."""

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
