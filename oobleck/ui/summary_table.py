"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oobleck.control.journal import Action, RecoverySummary, Summary

from . import formatting

_MAX_RECOVERIES = 20


def summary_table(summary: Summary) -> RenderableType:
    """Draw a summary: progress, speed, goodput, and the newest 20 recoveries."""
    facts = facts_table(f"{summary.tag}: {summary.reason}" if summary.reason else summary.tag, _facts(summary))
    if not summary.recoveries:
        return facts
    return Group(facts, _recoveries(summary.recoveries))


def facts_table(title: str, facts: Iterable[tuple[str, RenderableType]]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column("what", style="dim", no_wrap=True)
    table.add_column("value")
    for label, value in facts:
        table.add_row(label, value)
    return table


def _facts(summary: Summary) -> Iterator[tuple[str, RenderableType]]:
    yield "steps committed", formatting.steps_text(summary)
    if summary.saves_failed or (summary.saved_step or summary.last_step) < summary.last_step:
        newest = "none" if summary.saved_step is None else f"that of step {summary.saved_step}"
        text = f"the newest checkpoint is {newest}; {summary.saves_failed} saves failed"
        yield "saved", Text(text, style="bold red" if summary.saved_step != summary.last_step else "")
    if summary.journal_lacks:
        yield "journal", Text(summary.journal_lacks, style="bold red")
    yield "steps lost", _bad_unless_zero(summary.steps_lost)
    yield "samples committed", formatting.count_text(summary.samples_committed)
    yield "samples repeated", _bad_unless_zero(summary.samples_repeated)
    yield "samples missing", _bad_unless_zero(summary.samples_missing)
    if summary.losses:
        yield "loss", f"{summary.losses[0]:.4f} → {summary.losses[-1]:.4f}"
    if summary.evaluations:
        last = summary.evaluations[-1]
        yield "evaluation loss", f"{summary.evaluations[0].loss:.4f} → {last.loss:.4f} after step {last.step}"
    yield "tokens/s", formatting.count_text(summary.tokens_per_s)
    if summary.step_time_s is not None:
        step = summary.step_time_s
        yield (
            "step time",
            f"median {formatting.seconds_text(step.median)}, 95th percentile {formatting.seconds_text(step.p95)}",
        )
    yield "elapsed", formatting.duration_text(summary.elapsed_s)
    yield "goodput", formatting.percent_text(summary.goodput)
    causes = [
        f"{cause} {formatting.seconds_text(seconds)}" for cause, seconds in summary.downtime_s.items() if seconds > 0
    ]
    yield "time elsewhere", ", ".join(causes) or "none"
    if summary.node_hours is not None and summary.node_hours.there:
        yield "node-hours", formatting.node_hours_text(summary.node_hours)
    yield "generations", str(summary.generations)
    yield "recoveries", formatting.recoveries_text(summary)
    yield "seed", str(summary.seed)


def _bad_unless_zero(count: int) -> Text:
    return Text(f"{count:,}", style="bold red" if count else "")


def _recoveries(recoveries: tuple[RecoverySummary, ...]) -> Table:
    shown = recoveries[-_MAX_RECOVERIES:]
    left_out = len(recoveries) - len(shown)
    title = "Recoveries and planned changes, in seconds" + (f" (the first {left_out} are left out)" if left_out else "")
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("at", no_wrap=True)
    table.add_column("what", overflow="fold")
    for header in ("detect", "decide", "transfer", "stall", "moved", "redone"):
        table.add_column(header, justify="right", no_wrap=True)
    for recovery in shown:
        table.add_row(
            formatting.duration_text(recovery.t_s),
            f"{_names(recovery.nodes)}: {recovery.cause.replace('_', ' ')}; "
            f"{'not completed' if recovery.unfinished else Action(recovery.action).words}",
            *(f"{s:.3f}" for s in (recovery.detect_s, recovery.decide_s, recovery.transfer_s, recovery.stall_s)),
            formatting.bytes_text(recovery.bytes_moved),
            str(recovery.microbatches_redone),
        )
    return table


def _names(nodes: tuple[str, ...]) -> str:
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
