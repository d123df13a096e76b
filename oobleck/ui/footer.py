"""The last line of a dashboard, and its page of help: which keys there are, and what signs and words mean."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.text import Text

from oobleck.control.journal import NodeState, RunSnapshot

from .controls import HELP, LEGEND, Controls, Mode
from .formatting import one_line

_KEYS = (
    ("?", "help"), ("↑↓", "events"), ("k", "kill"), ("d", "drain"), ("s", "stop"), ("q", "quit, the run continues"),
)  # fmt: skip
_MOST_NODES = 8
_COLUMN = 25


def living_nodes(snapshot: RunSnapshot) -> list[str]:
    """Return the nodes that can be killed or drained."""
    gone = (NodeState.LOST, NodeState.ENDED)
    return [one_line(node.name) for node in snapshot.nodes if node.state not in gone]


def footer(controls: Controls, snapshot: RunSnapshot) -> Text:
    """Return the line for what the user is doing."""
    match controls.mode:
        case Mode.CONFIRMING:
            ends = "before its first step, that ends the run " if snapshot.phase and controls.what == "kill" else ""
            return Text.assemble((f" {controls.question} {ends}", "bold yellow"), ("y/n", "bold reverse"))
        case Mode.CHOOSING:
            return _choice(controls, living_nodes(snapshot))
        case Mode.HELP:
            return Text(" any key leaves this page", style="dim")
    if controls.message:
        return Text(f" {one_line(controls.message)}", style="bold yellow")
    parts = [(part, style) for key, what in _KEYS for part, style in ((f" {key}", "bold"), (f" {what} ", "dim"))]
    below = f" {controls.scrolled} newer events: End " if controls.scrolled else ""
    return Text.assemble((below, "yellow"), *parts)


def _choice(controls: Controls, nodes: Sequence[str]) -> Text:
    found = controls.matching(nodes)
    text = Text.assemble((f" {controls.what} which node? {one_line(controls.typed)}", "bold yellow"), "▏ ")
    chosen = controls.node if controls.node in found else next(iter(found), "")
    place = found.index(chosen) if found else 0
    first = max(0, min(place - _MOST_NODES // 2, len(found) - _MOST_NODES))
    for node in found[first : first + _MOST_NODES]:
        text.append(f" {node} ", "reverse" if node == chosen else "")
    if not found:
        text.append("no such node", "red")
    return text.append("  ↑↓, Enter, Esc", "dim")


def help_lines(width: int) -> list[Text]:
    """Return the page of help."""
    lines: list[Text] = []
    for title, rows in (("Keys", HELP), ("Signs and words", LEGEND)):
        lines += [Text(""), Text(f" {title}", style="bold")]
        for name, what in rows:
            first, *others = textwrap.wrap(what, max(20, width - _COLUMN - 1))
            lines.append(Text.assemble(" ", (name.ljust(_COLUMN), "cyan"), first))
            lines += [Text(" " * (_COLUMN + 1) + other) for other in others]
    return lines
