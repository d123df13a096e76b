"""What a run did over time, as series to draw: throughput, nodes, loss, and the plan of each generation.

Computed from the journal alone, running or finished, and thinned, so that a run of months is as easy to draw as one
of minutes. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .entries import JournalEntry
from .goodput import TimeAccount, TimeSplit
from .plan_entries import PlanAdopted
from .run_entries import JobStarted
from .step_entries import StepDone, StepsDone

__all__ = ["History", "history_of", "mean_rates", "thinned"]

MAX_POINTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run over time; all times in seconds since its start."""

    started: JobStarted | None
    elapsed_s: float
    split: TimeSplit
    rates: tuple[tuple[float, float, float], ...]
    """(from, until, tokens/s): each step's tokens over the time since the step before, so that a pause is a dip."""
    num_nodes: tuple[tuple[float, int], ...]
    """(since when, nodes that train)."""
    losses: tuple[tuple[float, float], ...]
    """(step, loss), of losses that are numbers; a step that was committed again counts as it was committed last."""
    plans: tuple[PlanAdopted, ...]


def history_of(entries: Iterable[JournalEntry], *, now_s: float | None = None) -> History:
    """Collect a run's history: O(entries). `now_s` is the age of a run that goes on; None ends it at its last entry."""
    account = TimeAccount()
    started: JobStarted | None = None
    rates: list[tuple[float, float, float]] = []
    losses: dict[int, float] = {}
    plans: list[PlanAdopted] = []
    elapsed_s = 0.0
    for entry in entries:
        account.apply(entry)
        elapsed_s = max(elapsed_s, entry.t_s)
        match entry:
            case JobStarted():
                started = entry
            case PlanAdopted():
                plans.append(entry)
            case StepDone() | StepsDone():
                _add_rate(rates, entry)
                if isinstance(entry, StepDone) and math.isfinite(entry.record.loss):
                    losses[entry.record.step] = entry.record.loss
            case _:
                pass
    elapsed_s = max(elapsed_s, now_s or 0.0)
    return History(
        started=started,
        elapsed_s=elapsed_s,
        split=account.at(elapsed_s),
        rates=mean_rates(rates, elapsed_s),
        num_nodes=tuple((plan.t_s, len(plan.plan.nodes)) for plan in plans),
        losses=thinned([(float(step), loss) for step, loss in sorted(losses.items())]),
        plans=tuple(plans),
    )


def _add_rate(rates: list[tuple[float, float, float]], entry: StepDone | StepsDone) -> None:
    if isinstance(entry, StepDone):
        tokens, worked_s = entry.tokens, entry.record.duration_s
    else:
        tokens, worked_s = entry.tokens_per_step * entry.num_steps, entry.record.duration_s * entry.num_steps
    since_s = rates[-1][1] if rates else max(0.0, entry.t_s - worked_s)
    if entry.t_s > since_s:
        rates.append((since_s, entry.t_s, tokens / (entry.t_s - since_s)))


def mean_rates(
    rates: Sequence[tuple[float, float, float]], elapsed_s: float, *, most: int = MAX_POINTS
) -> tuple[tuple[float, float, float], ...]:
    """Rates in at most so many intervals of equal length, each with the mean over it: their integral stays the same."""
    if len(rates) <= most or elapsed_s <= 0:
        return tuple(rates)
    width_s = elapsed_s / most
    amounts = [0.0] * most
    for since_s, until_s, rate in rates:
        first, last = int(since_s / width_s), min(most - 1, int(until_s / width_s))
        for index in range(first, last + 1):
            overlap_s = min(until_s, (index + 1) * width_s) - max(since_s, index * width_s)
            amounts[index] += rate * max(0.0, overlap_s)
    return tuple((i * width_s, (i + 1) * width_s, amount / width_s) for i, amount in enumerate(amounts))


def thinned(points: Sequence[tuple[float, float]], *, most: int = MAX_POINTS) -> tuple[tuple[float, float], ...]:
    """At most about so many points: means of neighbours; the first and the last stay as they are."""
    if len(points) <= most:
        return tuple(points)
    size = math.ceil((len(points) - 2) / (most - 2))
    inner = [points[start : start + size] for start in range(1, len(points) - 1, size)]
    inner[-1] = inner[-1][: len(points) - 1 - (1 + size * (len(inner) - 1))]
    means = [
        (math.fsum(x for x, _ in part) / len(part), math.fsum(y for _, y in part) / len(part)) for part in inner if part
    ]
    return (points[0], *means, points[-1])
