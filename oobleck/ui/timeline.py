"""The timeline of a step in a terminal: a row for each stage, and a column for each equal share of time.

A column shows what its stage does for most of that time. If a whole step is too long for the width, only its beginning
and its end are drawn, since the part between repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from oobleck.schedule import Op, Span, Timeline

from .formatting import percent_text, seconds_text


class Look(NamedTuple):
    """How an instruction is drawn. Glyphs differ as well as colours, for terminals and people without colours."""

    words: str
    glyph: str
    style: str
    """The style in a terminal."""
    colour: str
    """The colour in pictures. Colour-blind people can distinguish them, and so can print, by brightness."""


LOOKS = {
    Op.FORWARD: Look("forward", "█", "blue", "#4c78a8"),
    Op.BACKWARD: Look("backward", "▓", "green", "#f2a541"),
    Op.BACKWARD_INPUT: Look("backward", "▓", "green", "#f2a541"),
    Op.BACKWARD_WEIGHT: Look("weight gradients", "▒", "yellow", "#9fc79a"),
    Op.LOAD: Look("load", "▏", "cyan", "#79706e"),
    Op.REDUCE_GRAD: Look("reduce", "=", "magenta", "#b279a2"),
    Op.COMMIT: Look("commit", "|", "red", "#d62728"),
    Op.OPTIMIZER_STEP: Look("optimizer", "%", "cyan", "#439894"),
}
IDLE = Look("idle", "·", "bright_black", "#eeeeee")
_GAP = " ⋯ "
_MIN_COLUMNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    title: str
    labels: tuple[str, ...]
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class _Window:
    start_s: float
    column_s: float
    columns: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.columns * self.column_s


def timeline_lines(timeline: Timeline, *, width: int, labels: Sequence[str] = ()) -> list[Text]:
    """Draw a step in lines of at most `width` cells: a row for each stage, the times, and a legend.

    `labels` name the stages; by default they are numbered.
    """
    names = labels or [f"stage {stage}" for stage in range(timeline.schedule.num_stages)]
    label_width = max(map(cell_len, names)) + 1
    windows = _windows(timeline, max(_MIN_COLUMNS, width - label_width))
    lines = []
    for name, spans in zip(names, timeline.spans, strict=True):
        line = Text(name + " " * (label_width - cell_len(name)), style="bold")
        for index, window in enumerate(windows):
            if index:
                line.append(_GAP, "dim")
            _draw(line, spans, window)
        lines.append(line)
    lines += [_axis(windows, label_width), *_legend(timeline, width)]
    for line in lines:
        line.truncate(width)
    return lines


def _windows(timeline: Timeline, columns: int) -> list[_Window]:
    """Return the whole step, or its beginning and its end if a forward pass would get less than a column."""
    makespan_s = timeline.makespan_s
    forwards = [s.end_s - s.start_s for spans in timeline.spans for s in spans if s.instruction.op is Op.FORWARD]
    forward_s = sum(forwards) / len(forwards) if forwards else makespan_s
    if makespan_s <= columns * forward_s or columns < 4 * _MIN_COLUMNS:
        return [_Window(0.0, makespan_s / columns, columns)]
    half = (columns - len(_GAP)) // 2
    # The beginning lasts at least until the last stage works.
    filled_s = max(spans[0].start_s for spans in timeline.spans if spans)
    column_s = max(forward_s, 1.5 * filled_s / half)
    if 2 * half * column_s >= makespan_s:
        return [_Window(0.0, makespan_s / columns, columns)]
    return [_Window(0.0, column_s, half), _Window(makespan_s - half * column_s, column_s, half)]


def _draw(line: Text, spans: Sequence[Span], window: _Window) -> None:
    for owner, run in groupby(_owners(spans, window)):
        length = len(list(run))
        _, glyph, style, _ = IDLE if owner is None else LOOKS[owner.instruction.op]
        microbatch = "" if owner is None or owner.instruction.microbatch is None else str(owner.instruction.microbatch)
        number = microbatch if len(microbatch) < length else ""
        line.append(number, f"bold white on {style}")
        line.append(glyph * (length - len(number)), style)


def _owners(spans: Sequence[Span], window: _Window) -> list[Span | None]:
    """Return the span that fills most of each column; None where the stage is mostly idle."""
    if not window.column_s:
        return [None] * window.columns
    owners: list[Span | None] = [None] * window.columns
    most_s = [0.0] * window.columns
    busy_s = [0.0] * window.columns
    for span in spans:
        first = int((span.start_s - window.start_s) / window.column_s)
        last = int((span.end_s - window.start_s) / window.column_s)
        for column in range(max(first, 0), min(last, window.columns - 1) + 1):
            left_s = window.start_s + column * window.column_s
            shared_s = max(0.0, min(span.end_s, left_s + window.column_s) - max(span.start_s, left_s))
            busy_s[column] += shared_s
            if shared_s > most_s[column]:
                most_s[column], owners[column] = shared_s, span
    return [owner if busy >= window.column_s / 2 else None for owner, busy in zip(owners, busy_s, strict=True)]


def _axis(windows: Sequence[_Window], label_width: int) -> Text:
    parts = []
    for window in windows:
        left, right = seconds_text(window.start_s), seconds_text(window.end_s)
        parts.append(left + right.rjust(window.columns - len(left)))
    return Text(" " * label_width + _GAP.join(parts).replace("⋯", " "), style="dim")


def _legend(timeline: Timeline, width: int) -> list[Text]:
    used = {span.instruction.op for spans in timeline.spans for span in spans}
    idle = f"idle {percent_text(timeline.bubble_share)} up to the last backward pass"
    # Both kinds of backward pass have one mark and one word.
    entries = [IDLE._replace(words=idle), *dict.fromkeys(look for op, look in LOOKS.items() if op in used)]
    lines = [Text()]
    for words, glyph, style, _ in entries:
        if lines[-1] and cell_len(lines[-1].plain) + len(words) + 2 > width:
            lines.append(Text())
        lines[-1].append(glyph, style).append(f" {words}  ")
    return lines
