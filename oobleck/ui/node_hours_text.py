"""What a run's nodes were there for, in a line."""

from __future__ import annotations

from oobleck.control.journal import NodeSummary

from .formatting import hours_text, percent_text

__all__ = ["node_hours_text"]


def node_hours_text(nodes: NodeSummary) -> str:
    """Say how many node-hours were there, what they went into, and what was got for them."""
    parts = ("training", nodes.training), ("idle", nodes.idle), ("recovering", nodes.recovering), ("other", nodes.other)
    told = ", ".join(
        f"{what} {hours_text(hours)} ({percent_text(hours / nodes.there)})" for what, hours in parts if hours
    )
    each = nodes.per_million_tokens
    return f"{hours_text(nodes.there)}: {told}" + ("" if each is None else f"; {each:.3g} per million tokens")
