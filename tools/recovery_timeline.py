"""Draw what a recovery did to the steps around it, from a run's journal.

    python tools/recovery_timeline.py ~/.oobleck/gpt2-demo/journal.jsonl recovery.svg

Two scales of one time: the steps around the first recovery of the run, and the recovery itself. Everything drawn is an
entry of the journal; nothing is smoothed or moved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from oobleck.control.journal import JournalEntry, PlanAdopted, RecoveryDone, StepDone
from oobleck.runtime.journals import read_journal

__all__ = ["Recovery", "find_recovery", "main", "recovery_svg"]

_WIDTH, _MARGIN, _LABELS = 960, 20, 120
_ROW, _BAR = 34, 22
_LAST_TICK = 12
"""Room for the right half of the label at the end of an axis."""
_STEPS_AROUND = 2
_COLOURS = {"step": "#4c78a8", "finished": "#439894", "silent": "#bab0ac", "decide": "#f2a541", "adopt": "#b279a2"}
_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_CHAR_WIDTH = 6.5
"""Of the font's average character at 12 px."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A recovery and the steps around it; times are seconds since the run started."""

    done: RecoveryDone
    ordered_s: float
    """When the last order of the recovery went out."""
    steps: tuple[StepDone, ...]

    @property
    def heard_s(self) -> float:
        """When the node that was lost was last heard of."""
        return self.done.began_s - self.done.detect_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    start_s: float
    stop_s: float
    kind: str
    text: str


def find_recovery(entries: Iterable[JournalEntry]) -> Recovery | None:
    """The first recovery of a journal, with up to two steps before it and two after; None where there is none."""
    steps: list[StepDone] = []
    ordered_s = 0.0
    done: RecoveryDone | None = None
    for entry in entries:
        match entry:
            case PlanAdopted() if done is None:
                ordered_s = entry.t_s
            case RecoveryDone() if done is None:
                done = entry
            case StepDone():
                steps.append(entry)
            case _:
                pass
    if done is None:
        return None
    before = [step for step in steps if step.t_s <= done.began_s][-_STEPS_AROUND:]
    meanwhile = [step for step in steps if done.began_s < step.t_s <= done.t_s]
    after = [step for step in steps if step.t_s > done.t_s][:_STEPS_AROUND]
    return Recovery(done=done, ordered_s=ordered_s, steps=(*before, *meanwhile, *after))


def recovery_svg(recovery: Recovery) -> str:
    """Return the picture as the text of an SVG file."""
    done = recovery.done
    steps = list(_step_bars(recovery))
    phases = [
        _Bar(start_s=recovery.heard_s, stop_s=done.began_s, kind="silent", text="not noticed yet"),
        _Bar(start_s=done.began_s, stop_s=recovery.ordered_s, kind="decide", text="fence and decide"),
        _Bar(start_s=recovery.ordered_s, stop_s=done.t_s, kind="adopt", text="finish the step, adopt the plan"),
    ]
    parts = [_text(_MARGIN, _MARGIN + 12, done.sentence, bold=True)]
    top = _MARGIN + 40
    parts += _panel(top, [("steps", steps), ("recovery", phases)], begin_s=done.began_s)
    top += 2 * _ROW + 64
    parts.append(_text(_MARGIN, top, "the recovery alone"))
    top += 14
    rows = [(bar.text, [bar]) for bar in phases]
    parts += _panel(top, rows, begin_s=done.began_s, labels=220)
    top += 3 * _ROW + 50
    caption = (
        f"noticed {_ms(done.detect_s)} after the last message of {', '.join(done.nodes) or 'all'}; orders "
        f"{_ms(done.decide_s)} later; layers copied in {_ms(done.transfer_s)}; no progress for {_ms(done.stall_s)}"
    )
    parts.append(_text(_MARGIN, top, caption))
    height = top + _MARGIN
    size = f'width="{_WIDTH}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {height}" {_FONT} font-size="12">'
    return "\n".join((opening, f'<rect {size} fill="white"/>', *parts, "</svg>", ""))


def _step_bars(recovery: Recovery) -> Iterator[_Bar]:
    """A step lasts as long as its commit says; the one that the loss interrupted is told apart."""
    for step in recovery.steps:
        start_s = step.t_s - step.record.duration_s
        interrupted = start_s <= recovery.ordered_s < step.t_s
        yield _Bar(
            start_s=start_s,
            stop_s=step.t_s,
            kind="finished" if interrupted else "step",
            text=f"step {step.record.step}" + (" (interrupted, finished)" if interrupted else ""),
        )


def _panel(
    top: int, rows: Sequence[tuple[str, Sequence[_Bar]]], *, begin_s: float, labels: int = _LABELS
) -> Iterator[str]:
    """Rows of bars over an axis that counts from `begin_s`."""
    bars = [bar for _, row in rows for bar in row]
    first_s, last_s = min(bar.start_s for bar in bars), max(bar.stop_s for bar in bars)
    left, width = _MARGIN + labels, _WIDTH - 2 * _MARGIN - labels - _LAST_TICK
    scale = width / ((last_s - first_s) or 1.0)
    for index, (label, row) in enumerate(rows):
        y = top + index * _ROW
        yield _text(_MARGIN, y + 15, label)
        for bar in row:
            x, bar_width = left + (bar.start_s - first_s) * scale, (bar.stop_s - bar.start_s) * scale
            yield from _drawn(bar, x, y, bar_width, is_named=bar.text == label)
    bottom = top + len(rows) * _ROW
    noticed_x = left + (begin_s - first_s) * scale
    yield f'<line x1="{noticed_x:.1f}" y1="{top - 6}" x2="{noticed_x:.1f}" y2="{bottom}" stroke="#d62728"/>'
    yield f'<line x1="{left}" y1="{bottom}" x2="{left + width}" y2="{bottom}" stroke="#555555"/>'
    for tick_s in _ticks(first_s - begin_s, last_s - begin_s):
        x = left + (tick_s + begin_s - first_s) * scale
        yield f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#555555"/>'
        yield _text(x, bottom + 17, "noticed" if tick_s == 0 else f"{1000 * tick_s:+.0f} ms", anchor="middle")


def _drawn(bar: _Bar, x: float, y: int, width: float, *, is_named: bool) -> Iterator[str]:
    """A bar with as much of its text as fits, unless its row has the same name."""
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 1):.1f}" height="{_BAR}" fill="{_COLOURS[bar.kind]}">'
        f"<title>{escape(bar.text)}: {_ms(bar.stop_s - bar.start_s)}</title></rect>"
    )
    text = next((each for each in (bar.text, bar.text.split(" (")[0]) if len(each) * _CHAR_WIDTH < width - 8), None)
    if text is not None and not is_named:
        yield _text(x + 5, y + 15, text, colour="white")


def _ticks(first_s: float, last_s: float) -> list[float]:
    """Round times, 0 among them, at most about eight."""
    rough_s = (last_s - first_s) / 8 or 1.0
    unit_s = 10.0 ** (len(f"{rough_s:.9f}".split(".")[0]) - 1) if rough_s >= 1 else 1.0
    while unit_s > rough_s:
        unit_s /= 10
    step_s = next(unit_s * factor for factor in (1, 2, 5, 10) if unit_s * factor >= rough_s)
    first, last = int(first_s / step_s), int(last_s / step_s)
    return [number * step_s for number in range(first, last + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222222", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def main() -> int:
    """Read the command line, draw; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw the first recovery of a run from its journal.")
    parser.add_argument("journal", type=Path, help="journal.jsonl of a run")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    arguments = parser.parse_args()
    recovery = find_recovery(read_journal(arguments.journal))
    if recovery is None:
        print(f"{arguments.journal}: no node was lost in this run", file=sys.stderr)
        return 1
    arguments.picture.write_text(recovery_svg(recovery), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
