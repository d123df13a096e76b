"""The map of pipelines: one row each, with a box for every stage, in as many lines as there is room for.

Three sizes, the largest that fits: boxes of three lines, cells of one line, and one coloured block a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from oobleck.control.snapshot import PipelineView, StageView, WorkState

from .words import layers_text, one_line

__all__ = ["STATE_STYLES", "pipeline_lines"]

STATE_STYLES = {
    WorkState.STARTING: "cyan",
    WorkState.TRAINING: "green",
    WorkState.RECONFIGURING: "yellow",
    WorkState.LOST: "bold red",
    WorkState.ENDED: "bright_black",
}

_MARKS = {
    WorkState.STARTING: "…",
    WorkState.TRAINING: "",
    WorkState.RECONFIGURING: "~",
    WorkState.LOST: "✗",
    WorkState.ENDED: "",
}

_MIN_CELL = 8
_MAX_CELL = 24

Row = list[Text]


def pipeline_lines(pipelines: Sequence[PipelineView], *, width: int, height: int) -> list[Text]:
    """Draw the pipelines in at most `height` lines of at most `width` cells.

    Where not all fit, those in trouble are kept, and the last line counts the ones left out.
    """
    if not pipelines or height < 1:
        return []
    num_stages = max(len(pipeline.stages) for pipeline in pipelines)
    label_width = max(cell_len(_label(index, pipeline)) for index, pipeline in enumerate(pipelines)) + 1
    cell_width = (width - label_width) // num_stages
    draw: Callable[[str, PipelineView], Row]
    if cell_width < _MIN_CELL:
        draw, lines_each = (lambda label, pipeline: [_blocks(label, pipeline, width)]), 1
    elif 3 * len(pipelines) > height:
        cell = min(cell_width, _MAX_CELL)
        draw, lines_each = (lambda label, pipeline: [_cells(label, pipeline, cell)]), 1
    else:
        cell = min(cell_width, _MAX_CELL)
        draw, lines_each = (lambda label, pipeline: _boxes(label, pipeline, cell)), 3
    shown = _choose(pipelines, height // lines_each if len(pipelines) * lines_each <= height else height - 1)
    lines = [
        line for index in shown for line in draw(_label(index, pipelines[index]).ljust(label_width), pipelines[index])
    ]
    if len(shown) < len(pipelines):
        lines.append(Text(f"… and {len(pipelines) - len(shown)} more pipelines", style="dim"))
    return [_cut(line, width) for line in lines[:height]]


def _choose(pipelines: Sequence[PipelineView], room: int) -> list[int]:
    """The pipelines to show, in order: all that fit, those that are not simply training first."""
    troubled = [i for i, p in enumerate(pipelines) if any(s.state is not WorkState.TRAINING for s in p.stages)]
    others = [i for i in range(len(pipelines)) if i not in set(troubled)]
    return sorted((troubled + others)[: max(0, room)])


def _label(index: int, pipeline: PipelineView) -> str:
    return f"{index} ×{pipeline.num_microbatches}"


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
        layers = layers_text(stage.first_layer, stage.stop_layer)
        name = f"{one_line(stage.node)}{_mark(stage)}"
        room = cell - 3 - len(layers)
        text = f"{_fit(name, room).rstrip()} {layers}" if room >= 3 else name
        line.append("▌", STATE_STYLES[stage.state])
        line.append(_fit(text, cell - 2), STATE_STYLES[stage.state])
        line.append(" ")
    return line


def _blocks(label: str, pipeline: PipelineView, width: int) -> Text:
    """One block a stage; where even that is too wide, every stage in trouble and a share of the others."""
    line = Text(label, style="bold")
    room = max(1, width - len(label))
    stages = pipeline.stages
    for block in range(min(room, len(stages))):
        span = stages[block * len(stages) // room : (block + 1) * len(stages) // room] if len(stages) > room else ()
        stage = max(span, key=_trouble) if span else stages[block]
        line.append("✗" if stage.state is WorkState.LOST else "■", STATE_STYLES[stage.state])
    return line


def _trouble(stage: StageView) -> int:
    return list(STATE_STYLES).index(stage.state) if stage.state is not WorkState.ENDED else 0


def _layers(stage: StageView, room: int) -> str:
    numbers = layers_text(stage.first_layer, stage.stop_layer)
    long = f"{'layer' if stage.stop_layer - stage.first_layer == 1 else 'layers'} {numbers}"
    return long if len(long) <= room else numbers


def _mark(stage: StageView) -> str:
    mark = _MARKS[stage.state]
    devices = f"×{stage.num_devices}" if stage.num_devices > 1 else ""
    return f"{devices} {mark}" if mark else devices


def _fit(text: str, width: int) -> str:
    """Exactly `width` cells: padded, or cut in the middle, where names differ least."""
    if cell_len(text) <= width:
        return set_cell_size(text, max(0, width))
    if width < 5:
        return set_cell_size(text, max(0, width))
    tail = (width - 1) // 2
    return set_cell_size(text[: width - 1 - tail] + "…" + text[len(text) - tail :], width)


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="crop")
    return line
