"""The map of pipelines, each with its stages in order, at the largest size that fits.

There are four sizes: boxes of three lines; cells of one line; cells just wide enough, with several pipelines side by
side; one coloured block for each stage, side by side as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from oobleck.control.journal import PipelineView, StageView, WorkState

from .formatting import chunks_text, one_line

STATE_STYLES: Mapping[str, str] = {
    **dict.fromkeys(("starting", "connecting", "connected", "ready"), "cyan"),
    "training": "green",
    "spare": "blue",
    **dict.fromkeys(("reconfiguring", "waiting"), "yellow"),
    **dict.fromkeys(("lost", "failed"), "bold red"),
    "ended": "bright_black",
    "done": "bold green",
    "stopped": "bold yellow",
}

_MARKS = {WorkState.STARTING: "…", WorkState.RECONFIGURING: "~", WorkState.LOST: "✗"}
_MIN_CELL = 8
_MAX_CELL = 24
_MAX_NARROW_CELL = 14

Row = list[Text]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """A way to draw a pipeline, in `height` lines of `width` cells that include the gap to the next pipeline."""

    draw: Callable[[str, PipelineView], Row]
    width: int
    height: int = 1

    def per_row(self, width: int) -> int:
        return max(1, (width + 1) // self.width)

    def lines_for(self, num_pipelines: int, width: int) -> int:
        return -(-num_pipelines // self.per_row(width)) * self.height


def pipeline_lines(pipelines: Sequence[PipelineView], *, width: int, height: int) -> list[Text]:
    """Draw the pipelines in at most `height` lines of at most `width` cells, at the largest size that fits them all.

    If none does, those in trouble come first, and the last line counts the ones left out.
    """
    if not pipelines or height < 1:
        return []
    labels = [f"{index} ×{pipeline.num_microbatches}" for index, pipeline in enumerate(pipelines)]
    label_width = max(map(len, labels)) + 1
    sizes = list(_sizes(pipelines, width, label_width))
    size = next((size for size in sizes if size.lines_for(len(pipelines), width) <= height), sizes[-1])
    per_row = size.per_row(width)
    fits = size.lines_for(len(pipelines), width) <= height
    shown = list(range(len(pipelines))) if fits else _choose(pipelines, per_row * (height - 1))
    drawn = [size.draw(labels[index].ljust(label_width), pipelines[index]) for index in shown]
    lines = [
        _side_by_side([rows[line] for rows in drawn[start : start + per_row]], size.width)
        for start in range(0, len(drawn), per_row)
        for line in range(size.height)
    ]
    if not fits:
        lines.append(Text(f"… and {len(pipelines) - len(shown)} more pipelines", style="dim"))
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines


def _sizes(pipelines: Sequence[PipelineView], width: int, label_width: int) -> Iterator[_Size]:
    """Yield the sizes that the width allows, the largest first; blocks fit any width."""
    num_stages = max(len(pipeline.stages) for pipeline in pipelines)
    cell = min((width - label_width) // num_stages, _MAX_CELL)
    if cell >= _MIN_CELL:
        yield _Size(draw=lambda label, pipeline: _boxes(label, pipeline, cell), width=width + 1, height=3)
        yield _Size(draw=lambda label, pipeline: [_cells(label, pipeline, cell)], width=width + 1)
        # A cell has a bar, the node, a mark of trouble, the layers and a gap.
        widths = (cell_len(stage.node) + len(chunks_text(stage.chunks)) for each in pipelines for stage in each.stages)
        narrow = min(cell, _MAX_NARROW_CELL, max(widths) + 6)
        yield _Size(
            draw=lambda label, pipeline: [_cells(label, pipeline, narrow)], width=label_width + num_stages * narrow + 1
        )
    room = max(1, min(num_stages, width - label_width))
    yield _Size(draw=lambda label, pipeline: [_blocks(label, pipeline, room)], width=label_width + room + 2)


def _side_by_side(items: Row, width: int) -> Text:
    line = Text()
    for position, item in enumerate(items):
        line.append(" " * (position * width - line.cell_len)).append_text(item)
    return line


def _choose(pipelines: Sequence[PipelineView], room: int) -> list[int]:
    """Return the pipelines to show, in order: as many as fit, preferring those in trouble."""
    troubled = [i for i, p in enumerate(pipelines) if any(s.state is not WorkState.TRAINING for s in p.stages)]
    others = [i for i in range(len(pipelines)) if i not in set(troubled)]
    return sorted((troubled + others)[: max(0, room)])


def _boxes(label: str, pipeline: PipelineView, cell: int) -> Row:
    top, middle, bottom = Text(" " * len(label)), Text(label, style="bold"), Text(" " * len(label))
    for position, stage in enumerate(pipeline.stages):
        style = STATE_STYLES[stage.state]
        inner = cell - 3
        title = _fit(f" {_layers(stage, inner - 2)} ", inner)
        top.append(f"╭{title.rstrip() + ' ' if title.strip() else ''}".ljust(cell - 2, "─") + "╮", style)
        middle.append(f"│{_fit(f' {one_line(stage.node)}{_mark(stage)}', inner)}│", style)
        bottom.append("╰" + "─" * inner + "╯", style)
        is_last = position == len(pipeline.stages) - 1
        for line, joint in ((top, " "), (middle, " " if is_last else "→"), (bottom, " ")):
            line.append(joint, "dim")
    return [top, middle, bottom]


def _cells(label: str, pipeline: PipelineView, cell: int) -> Text:
    line = Text(label, style="bold")
    for stage in pipeline.stages:
        layers = chunks_text(stage.chunks)
        name = f"{one_line(stage.node)}{_mark(stage)}"
        room = cell - 3 - len(layers)
        text = f"{_fit(name, room).rstrip()} {layers}" if room >= 3 else name
        line.append("▌", STATE_STYLES[stage.state])
        line.append(_fit(text, cell - 2), STATE_STYLES[stage.state])
        line.append(" ")
    return line


def _blocks(label: str, pipeline: PipelineView, room: int) -> Text:
    """Draw one block for each stage, or, if that is too wide, one for several, in the state of the worst."""
    line = Text(label, style="bold")
    stages = pipeline.stages
    num_blocks, severities = min(room, len(stages)), list(WorkState)
    for block in range(num_blocks):
        span = stages[block * len(stages) // num_blocks : (block + 1) * len(stages) // num_blocks]
        stage = max(span, key=lambda each: 0 if each.state is WorkState.ENDED else severities.index(each.state))
        line.append("✗" if stage.state is WorkState.LOST else "■", STATE_STYLES[stage.state])
    return line


def _layers(stage: StageView, room: int) -> str:
    numbers = chunks_text(stage.chunks)
    long = f"{'layer' if sum(stop - first for first, stop in stage.chunks) == 1 else 'layers'} {numbers}"
    return long if len(long) <= room else numbers


def _mark(stage: StageView) -> str:
    mark = _MARKS.get(stage.state, "")
    devices = f"×{stage.num_devices}" if stage.num_devices > 1 else ""
    return f"{devices} {mark}" if mark else devices


def _fit(text: str, width: int) -> str:
    """Pad a text to exactly `width` cells, or cut its middle, where names differ least."""
    if cell_len(text) <= width or width < 5:
        return set_cell_size(text, max(0, width))
    tail = (width - 1) // 2
    return set_cell_size(text[: width - 1 - tail] + "…" + text[len(text) - tail :], width)
