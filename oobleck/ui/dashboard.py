"""The dashboard: a snapshot of a run drawn to fit a terminal of any size.

The same snapshot and size give the same lines. They always fit, and what matters most gets its room first: header,
progress, pipelines, then events and nodes.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from statistics import fmean

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from oobleck.control.journal import EventLine, NodeState, NodeView, PhaseView, RunSnapshot

from .controls import Controls, Mode
from .footer import footer, help_lines
from .formatting import count_text, duration_text, one_line, percent_text, seconds_text
from .pipeline_map import STATE_STYLES, pipeline_lines
from .sparkline import gauge, sparkline

_EVENT_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}

_GAP = "   "
_WIDE = 110
"""Cells from which on charts are beside the pipelines."""
_LEAST_CHART, _LEAST_EVENT, _LEAST_ROOM, _LEAST_CHARTS, _CHARTS_HEIGHT = 36, 20, 4, 12, 16
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SPINS_PER_S = 4
_MOST_ORIGINS = 12  # with more nodes, only names and states are drawn


class Dashboard:
    """A rich renderable of a snapshot; `fill` makes it as high as the terminal.

    With `controls`, its last line says which keys there are, or what they have begun.
    """

    def __init__(self, snapshot: RunSnapshot, *, fill: bool = True, controls: Controls | None = None) -> None:
        self.snapshot = snapshot
        self.fill = fill
        self.controls = controls

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Printed output shares the screen with the prompt that follows.
        height = options.height or (console.height if self.fill else max(1, console.height - 2))
        lines = dashboard_lines(
            self.snapshot, width=options.max_width, height=height, fill=self.fill, controls=self.controls
        )
        yield Text("\n").join(lines)


def dashboard_lines(
    snapshot: RunSnapshot, *, width: int, height: int, fill: bool = True, controls: Controls | None = None
) -> list[Text]:
    """Draw a snapshot in at most `height` lines of at most `width` cells.

    With `fill`, the events take all remaining height; otherwise only the newest few are drawn.
    """
    kinds = Counter(node.kind for node in snapshot.nodes if node.kind)
    if len(snapshot.nodes) > _MOST_ORIGINS and any(node.origin or node.kind for node in snapshot.nodes):
        snapshot = replace(snapshot, nodes=tuple(replace(node, origin="", kind="") for node in snapshot.nodes))
    head = [_title(snapshot, width), *_facts(snapshot, width), *_progress(snapshot, width)]
    foot = [] if controls is None or height <= len(head) + _LEAST_ROOM else [footer(controls, snapshot)]
    head = head[: max(1, height)]
    room = max(0, height - len(head) - len(foot))
    if controls is not None and controls.mode is Mode.HELP:
        body = help_lines(width)[:room]
    else:
        events = snapshot.events[: len(snapshot.events) - (0 if controls is None else controls.scrolled)]
        body = _Body(replace(snapshot, events=events), kinds, width, fill=fill).lines(room)
    if fill and foot:
        body += [Text("")] * (room - len(body))
    lines = [*head, *body, *foot]
    for line in lines[:height]:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


@dataclass(frozen=True, slots=True)
class _Body:
    """The sections below the progress: side by side where the terminal is wide."""

    snapshot: RunSnapshot
    kinds: Mapping[str, int]
    width: int
    _: KW_ONLY
    fill: bool

    def lines(self, room: int) -> list[Text]:
        has_curves = len(self.snapshot.losses) > 1
        if has_curves and self.width >= _WIDE and room >= _LEAST_CHARTS:
            return self._beside_charts(room)
        curves = _curve_lines(self.snapshot, self.width) if has_curves and room >= _LEAST_CHARTS else []
        events_wanted = min(len(self.snapshot.events), room if self.fill else 8)
        return [*curves, *self._sections(self.width, room - len(curves), events_wanted)]

    def _beside_charts(self, room: int) -> list[Text]:
        """Draw pipelines and nodes on the left, the charts on the right, and the events below both."""
        events_wanted = min(len(self.snapshot.events), room if self.fill else 8)
        events_room = min(events_wanted + 1, max(4, room // 3)) if events_wanted else 0
        left_width = max(self.width * 11 // 20, min(_widest(self.snapshot.nodes) + 2, self.width - _LEAST_CHART))
        left = self._sections(left_width, room - events_room, 0)
        # High charts are easier to read, but the events need the room that they have on a small screen.
        spare = min(room - events_wanted - 1, room * 2 // 3)
        charts_height = max(len(left), min(room - events_room, _CHARTS_HEIGHT), spare)
        right_width = self.width - left_width - len(_GAP)
        right = _charts(self.snapshot, right_width, charts_height)
        lines = []
        for row in range(max(len(left), len(right))):
            line = left[row].copy() if row < len(left) else Text("")
            line.truncate(left_width, overflow="ellipsis", pad=True)
            lines.append(line.append(_GAP).append_text(right[row]) if row < len(right) else line)
        events = _event_lines(self.snapshot.events, self.width, room - len(lines) - 1 if self.fill else events_wanted)
        return [*lines, *([_rule("Events", self.width), *events] if events else [])]

    def _sections(self, width: int, room: int, events_wanted: int) -> list[Text]:
        snapshot = self.snapshot
        pipelines_room, nodes_room, events_room = _share(snapshot, room, width, events_wanted)
        pipelines = pipeline_lines(snapshot.pipelines, width=width, height=pipelines_room)
        events_room = min(events_wanted, events_room + pipelines_room - len(pipelines))
        sections = (
            (f"Pipelines ({len(snapshot.pipelines)})  ×microbatches a step", pipelines),
            (_nodes_title(snapshot, self.kinds), _node_lines(snapshot.nodes, width, nodes_room)),
            ("Events", _event_lines(snapshot.events, width, events_room)),
        )
        lines = []
        for title, body in sections:
            if body:
                lines += [_rule(title, width), *body]
        return lines


def _curves(snapshot: RunSnapshot) -> Iterator[tuple[str, Sequence[float], float | None, str]]:
    """Yield each curve's name, its values, its lowest value on the scale, and its range in words."""
    losses, speeds = snapshot.losses, snapshot.speeds
    yield "loss", losses, None, f"{min(losses):.4f} – {max(losses):.4f}"
    yield "tokens/s", speeds, 0.0, f"0 – {count_text(max(speeds))}"


def _curve_lines(snapshot: RunSnapshot, width: int) -> list[Text]:
    lines = []
    for name, values, low, scale in _curves(snapshot):
        room = width - 12 - len(scale)
        drawn = sparkline(values, width=room, low=low)
        lines += [Text.assemble((f" {name:9}", "dim"), (row, "cyan"), (f" {scale}", "dim")) for row in drawn]
    return lines


def _charts(snapshot: RunSnapshot, width: int, height: int) -> list[Text]:
    """Draw each curve below its title, in `height` lines together."""
    lines = []
    heights = (height // 2, height - height // 2)
    for (name, values, low, scale), each in zip(_curves(snapshot), heights, strict=True):
        drawn = sparkline(values, width=width, height=each - 1, low=low)
        lines += [_rule(f"{name}  {scale}", width), *(Text(row, style="cyan") for row in drawn)]
    return lines


def _share(snapshot: RunSnapshot, room: int, width: int, events_wanted: int) -> tuple[int, int, int]:
    """Divide `room` lines among pipelines, nodes and events.

    Each section has a title and at least one line; pipelines get boxes if there is room.
    """
    num_pipelines, num_nodes = len(snapshot.pipelines), len(snapshot.nodes)
    nodes_wanted = -(-num_nodes // _columns(snapshot.nodes, width)) if num_nodes else 0
    titles = (num_pipelines > 0) + (num_nodes > 0) + (events_wanted > 0)
    body = room - titles
    if body < 3:
        return (max(0, room - 1) if num_pipelines else 0), 0, (0 if num_pipelines else max(0, room - 1))
    events = min(events_wanted, max(1, body // 4))
    nodes = min(nodes_wanted, max(1, (body - events) // 3))
    pipelines = body - events - nodes
    boxes = 3 * num_pipelines
    pipelines = boxes if boxes <= pipelines else min(num_pipelines, pipelines)
    spare = body - events - nodes - pipelines
    more_nodes = min(spare, nodes_wanted - nodes)
    more_events = min(spare - more_nodes, events_wanted - events)
    return pipelines, nodes + more_nodes, events + more_events


def _title(snapshot: RunSnapshot, width: int) -> Text:
    style = STATE_STYLES[snapshot.state]
    left = Text.assemble((" Oobleck ", "bold reverse"), " ", (one_line(snapshot.tag), "bold"))
    if snapshot.model:
        left.append(f" ({one_line(snapshot.model)})", "dim")
    right = Text(f"● {snapshot.state.value} ", style)
    left.append(" " * max(1, width - left.cell_len - right.cell_len))
    return left + right


def _facts(snapshot: RunSnapshot, width: int) -> list[Text]:
    steps = (
        ("step", f"{snapshot.step}/{snapshot.max_steps}"),
        ("loss", "–" if snapshot.loss is None else f"{snapshot.loss:.4f}"),
        ("tokens/s", count_text(snapshot.tokens_per_s)),
        ("step time", seconds_text(snapshot.step_time_s)),
        ("goodput", percent_text(snapshot.goodput)),
        ("f", f"{snapshot.fault_threshold}" + ("" if snapshot.redundant else " not met")),
        *((("remaining", duration_text(snapshot.remaining_s)),) if snapshot.exit_code is None else ()),
    )
    saved = (steps[0][0], str(snapshot.step)), *(each for each in steps if each[0] in ("loss", "step time", "goodput"))
    values = (
        *(steps if snapshot.max_steps else saved if snapshot.step else ()),  # a script's are those that it saves
        ("generation", str(snapshot.generation)),
        ("recoveries", str(snapshot.num_recoveries)),
        ("elapsed", duration_text(snapshot.elapsed_s)),
        *((("data", one_line(snapshot.data)),) if snapshot.data is not None else ()),
        *((("protected", snapshot.protected),) if snapshot.protected is not None else ()),
    )
    lines = [Text(" ")]
    for label, value in values:
        if value == duration_text(None):
            continue  # it is not known yet
        cells = cell_len(label) + 1 + cell_len(value)
        if lines[-1].cell_len > 1 and lines[-1].cell_len + len(_GAP) + cells > width:
            lines.append(Text(" "))
        if lines[-1].cell_len > 1:
            lines[-1].append(_GAP)
        warn = label == "f" and not snapshot.redundant
        lines[-1].append(f"{label} ", "dim").append(value, "bold yellow" if warn else "bold")
    return lines


def _progress(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the line of what is done of all steps, or before the first one of what the run does."""
    if snapshot.phase is not None:
        return [_phase(snapshot.phase, width)]
    if not snapshot.max_steps:
        return []  # the number of a script's steps is unknown
    share = min(1.0, snapshot.step / snapshot.max_steps)
    label = f" {share:4.0%} "
    room = max(1, width - len(label) - 2)
    done = round(share * room)
    return [Text.assemble(" ", ("━" * done, "green"), ("━" * (room - done), "bright_black"), label)]


def _phase(phase: PhaseView, width: int) -> Text:
    """Return the line that stands for the progress before the first step."""
    spinner = _SPINNER[int(phase.elapsed_s * _SPINS_PER_S) % len(_SPINNER)]
    text = Text.assemble((f" {spinner} ", "cyan"), phase.sentence, (f"  {seconds_text(phase.elapsed_s)}", "dim"))
    text.truncate(width, overflow="ellipsis")
    return text


def _nodes_title(snapshot: RunSnapshot, kinds: Mapping[str, int]) -> str:
    counts = {state: sum(node.state is state for node in snapshot.nodes) for state in NodeState}
    listed = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
    if kinds:
        listed += "; " + ", ".join(f"{count} {one_line(kind)}" for kind, count in kinds.items())
    return f"Nodes ({listed})" + (f": {one_line(snapshot.scaling)}" if snapshot.scaling else "")


def _heard(node: NodeView) -> str:
    if node.heard_s_ago is None or node.state in (NodeState.LOST, NodeState.ENDED):
        return ""
    return f" {node.heard_s_ago:.1f} s"


def _use_text(node: NodeView) -> str:
    """Return what a node uses: a block for each share, and the numbers."""
    use = node.use
    if use is None:
        return ""
    parts = [
        f"  {gauge(use.cores / use.num_cores)} cpu {use.cores:.1f}/{use.num_cores}",
        f"  {gauge(use.used_bytes / use.memory_bytes)} mem {use.used_bytes / 1e9:.1f}/{use.memory_bytes / 1e9:.0f} GB",
    ]
    if use.devices:
        busy = fmean(share for share, _, _ in use.devices)
        used, there = (sum(sizes) / 1e9 for sizes in list(zip(*use.devices, strict=True))[1:])
        count = f"×{len(use.devices)} " if len(use.devices) > 1 else ""
        parts.append(f"  {gauge(busy)} gpu {count}{busy:.0%} {used:.0f}/{there:.0f} GB")
    return "".join(parts)


def _node_text(node: NodeView) -> Text:
    style = STATE_STYLES[node.state]
    mark = "✗ " if node.state is NodeState.LOST else "● "
    origin = "".join(f" {one_line(words)}" for words in (node.kind, node.origin) if words)
    return Text.assemble(
        (mark, style), one_line(node.name), " ", (node.state.value, style), (_heard(node), "dim"), _use_text(node),
        (origin, "dim"),
    )  # fmt: skip


def _columns(nodes: Sequence[NodeView], width: int) -> int:
    """Return how many nodes fit side by side."""
    return max(1, (width + len(_GAP) - 1) // (_widest(nodes) + len(_GAP)))


def _widest(nodes: Sequence[NodeView]) -> int:
    """Return the cells of the longest text of a node."""
    # Cells are counted without drawing, as there may be thousands of nodes.
    return max(
        (
            cell_len(node.name)
            + len(node.state.value)
            + len(_heard(node))
            + len(_use_text(node))
            + bool(node.origin)
            + cell_len(node.origin)
            + bool(node.kind)
            + cell_len(node.kind)
            + 3
            for node in nodes
        ),
        default=1,
    )


def _node_lines(nodes: Sequence[NodeView], width: int, height: int) -> list[Text]:
    """Draw nodes in columns; if not all fit, lost ones come first, and the title counts all."""
    if not nodes or height < 1:
        return []
    columns = _columns(nodes, width)
    room = columns * height
    if len(nodes) > room:
        ranked = sorted(nodes, key=lambda node: node.state in (NodeState.TRAINING, NodeState.SPARE, NodeState.ENDED))
        kept = {node.name for node in ranked[:room]}
        nodes = [node for node in nodes if node.name in kept][:room]
    texts = [_node_text(node) for node in nodes]
    cell = max(text.cell_len for text in texts) + len(_GAP)
    lines = []
    for start in range(0, len(texts), columns):
        line = Text(" ")
        for text in texts[start : start + columns]:
            line.append_text(text).append(" " * (cell - text.cell_len))
        line.rstrip()
        lines.append(line)
    return lines


def _event_lines(events: Sequence[EventLine], width: int, height: int) -> list[Text]:
    """Draw the newest events that fit, each in as many lines as it needs."""
    lines: list[Text] = []
    for event in reversed(events):
        when, style = f" {duration_text(event.t_s)} ", _EVENT_STYLES.get(event.level, "")
        # Cells are not characters, but for the few that are twice as wide a line is cut at the edge.
        first, *others = textwrap.wrap(one_line(event.text), max(_LEAST_EVENT, width - len(when))) or [""]
        if len(lines) + 1 + len(others) > height and (lines or height < 1):
            break
        more = (Text(" " * len(when) + other, style) for other in others)
        lines[:0] = [Text.assemble((when, "dim"), (first, style)), *more]
    return lines[:height] if height > 0 else []


def _rule(title: str, width: int) -> Text:
    return Text.assemble(
        ("─ ", "bright_black"), (title, "bold"), (" " + "─" * max(0, width - len(title) - 3), "bright_black")
    )
