"""A summary's facts that every way of showing it words alike."""

from __future__ import annotations

from oobleck.control.journal import NodeSummary, Summary

from .formatting import count_text, hours_text, percent_text


def steps_text(summary: Summary) -> str:
    """The newest committed step, of all that the run was asked for, and how many this run has added to earlier ones."""
    reached = f"{count_text(summary.last_step)} of {count_text(summary.max_steps)}"
    return f"{reached}, {count_text(summary.steps_committed)} of them in this run" if summary.begun_after else reached


def recoveries_text(summary: Summary) -> str:
    """How many recoveries there were, and how often the plan changed with nothing wrong."""
    planned = len(summary.recoveries) - summary.num_recoveries
    changes = f", and {planned} planned change{'' if planned == 1 else 's'} of nodes" if planned else ""
    return f"{count_text(summary.num_recoveries)}{changes}"


def node_hours_text(nodes: NodeSummary) -> str:
    """Say how many node-hours were there, what they went into, and what was got for them."""
    parts = ("training", nodes.training), ("idle", nodes.idle), ("recovering", nodes.recovering), ("other", nodes.other)
    told = ", ".join(
        f"{what} {hours_text(hours)} ({percent_text(hours / nodes.there)})" for what, hours in parts if hours
    )
    each = nodes.per_million_tokens
    return f"{hours_text(nodes.there)}: {told}" + ("" if each is None else f"; {each:.3g} per million tokens")
