"""Timelines as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oobleck.schedule import Instruction, Span
from oobleck.ui.formatting import percent_text, seconds_text
from oobleck.ui.timeline import IDLE, LOOKS, Figure

from . import axes

_LABELS = 150
_ROW, _BAR = 22, 18
_TITLE, _AXIS = 26, 30
_TICKS = 8


def timeline_svg(figures: Sequence[Figure]) -> str:
    """Draw timelines below one another, on the same scale, and return the text of an SVG file."""
    longest_s = max(figure.timeline.makespan_s for figure in figures) or 1.0
    time = axes.Scale(0.0, longest_s, axes.MARGIN + _LABELS, axes.WIDTH - axes.MARGIN)
    parts: list[str] = []
    top = axes.MARGIN
    for figure in figures:
        parts += _figure(figure, top, time)
        top += _TITLE + _ROW * len(figure.labels) + axes.MARGIN // 2
    for number in range(_TICKS + 1):
        at_s, anchor = longest_s * number / _TICKS, "end" if number == _TICKS else "middle"
        parts += axes.tick(time(at_s), top, seconds_text(at_s), length=5, drop=18, colour="#888888", anchor=anchor)
    parts += _legend(figures, top + _AXIS)
    return axes.svg_file(parts, height=top + _AXIS + _ROW + axes.MARGIN)


def _figure(figure: Figure, top: int, time: axes.Scale) -> Iterator[str]:
    found = figure.timeline
    summary = f"{seconds_text(found.makespan_s)}, {percent_text(found.bubble_share)} bubble"
    yield axes.text(axes.MARGIN, top + 15, f"{figure.title}: {summary}", 'font-weight="bold"')
    for stage, (label, spans) in enumerate(zip(figure.labels, found.spans, strict=True)):
        y = top + _TITLE + stage * _ROW
        yield axes.text(axes.MARGIN, y + 13, label)
        yield axes.box(time.start, y, found.makespan_s * time.unit, _BAR, IDLE.colour)
        for span in spans:
            yield _bar(span, y, time)


def _bar(span: Span, y: int, time: axes.Scale) -> str:
    x, width = time(span.start_s), (span.end_s - span.start_s) * time.unit
    words = f"{_describe(span.instruction)}, {seconds_text(span.start_s)} to {seconds_text(span.end_s)}"
    # A gap between bars shows where one ends; below two pixels, nothing else would be seen.
    bar = axes.box(x, y, width - 0.5 if width > 2 else width, _BAR, LOOKS[span.instruction.op].colour, words)
    number = "" if span.instruction.microbatch is None else str(span.instruction.microbatch)
    if not number or width < axes.NUMBER_WIDTH * (len(number) + 1):
        return bar
    return bar + axes.text(x + width / 2, y + 13, number, 'text-anchor="middle" pointer-events="none" font-size="11"')


def _describe(instruction: Instruction) -> str:
    words = LOOKS[instruction.op].words
    if instruction.microbatch is None:
        return words
    chunk = f", chunk {instruction.chunk}" if instruction.chunk else ""
    return f"{words}, microbatch {instruction.microbatch}{chunk}"


def _legend(figures: Sequence[Figure], top: int) -> list[str]:
    used = {span.instruction.op for figure in figures for spans in figure.timeline.spans for span in spans}
    # Both kinds of backward pass have one colour and one word.
    entries = {look.words: look.colour for look in (*(LOOKS[op] for op in LOOKS if op in used), IDLE)}
    parts, _ = axes.legend(entries, axes.MARGIN + _LABELS, top, gap=17 + 2 * axes.NUMBER_WIDTH)
    return parts
