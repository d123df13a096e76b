"""A run over time, as series to draw: throughput, nodes, loss, rates, checkpoints, and the plan of each generation.

Computed from the journal alone, and thinned, so that a run of months is as easy to draw as one of minutes. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from oobleck.control.protocol import CommitRecord

from .entries import JournalEntry
from .goodput import TimeAccount, TimeSplit
from .plan_entries import PlanAdopted
from .rank_entries import GenerationFormed, ScriptStarted, StepsSaved
from .run_entries import JobStarted
from .step_entries import CheckpointSaved, StepDone, StepsDone

MAX_PLANS = 50
MAX_CHECKPOINTS = 20
MAX_POINTS = 400
_KEPT_POINTS = 8 * MAX_POINTS
"""How many points are kept while a journal is read; the drawn ones are means of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run over time; all times in seconds since its start."""

    started: JobStarted | None
    elapsed_s: float
    split: TimeSplit
    rates: tuple[tuple[float, float, float], ...]
    """(from, until, tokens/s): each step's tokens over the time since the step before, so that a pause is a dip."""
    num_nodes: tuple[tuple[float, int], ...]
    """(since when, how many nodes train)."""
    losses: tuple[tuple[float, float], ...]
    """(step, loss) of finite losses; a step that was committed again has its last one."""
    plans: tuple[PlanAdopted, ...]
    """The newest plans, `MAX_PLANS` at most."""
    num_plans: int
    grad_norms: tuple[tuple[float, float], ...] = ()
    """(step, global norm), like `losses`."""
    learning_rates: tuple[tuple[float, float], ...] = ()
    """(step, rate), like `losses`."""
    checkpoints: tuple[CheckpointSaved, ...] = ()
    """The newest ones, `MAX_CHECKPOINTS` at most."""
    num_checkpoints: int = 0
    script: ScriptStarted | None = None
    """In place of `started`, where the run is a script's."""
    generations: tuple[GenerationFormed, ...] = ()
    """The newest generations of the script, `MAX_PLANS` at most."""
    num_generations: int = 0


class HistoryAccount:
    """Collects a run's history as its journal is read, in bounded space."""

    def __init__(self) -> None:
        self._time = TimeAccount()
        self._started: JobStarted | None = None
        self._rates: list[tuple[float, float, float]] = []
        self._losses = _Thinning()
        self._grad_norms = _Thinning()
        self._learning_rates = _Thinning()
        self._checkpoints: deque[CheckpointSaved] = deque(maxlen=MAX_CHECKPOINTS)
        self._num_checkpoints = 0
        self._plans: deque[PlanAdopted] = deque(maxlen=MAX_PLANS)
        self._num_nodes: list[tuple[float, int]] = []
        self._elapsed_s = 0.0
        self._script: ScriptStarted | None = None
        self._generations: deque[GenerationFormed] = deque(maxlen=MAX_PLANS)
        self._num_generations = 0

    def apply(self, entry: JournalEntry) -> None:
        self._time.apply(entry)
        self._elapsed_s = max(self._elapsed_s, entry.t_s)
        match entry:
            case JobStarted():
                self._started = entry
            case ScriptStarted():
                self._script = entry
            case GenerationFormed():
                self._generations.append(entry)
                self._num_generations += 1
            case PlanAdopted():
                self._plans.append(entry)
                self._num_nodes.append((entry.t_s, len(entry.plan.nodes)))
            case StepsSaved(step=step, loss=float() as loss):
                if math.isfinite(loss):
                    self._losses.add(step, loss)
            case StepDone() | StepsDone():
                _add_rate(self._rates, entry)
                # Only once there are twice as many, so that thinning costs O(1) an entry on average.
                if len(self._rates) > 2 * _KEPT_POINTS:
                    self._rates = list(mean_rates(self._rates, self._rates[-1][1], most=_KEPT_POINTS))
                if isinstance(entry, StepDone):
                    self._add_values(entry.record)
            case CheckpointSaved():
                self._checkpoints.append(entry)
                self._num_checkpoints += 1
            case _:
                pass

    def _add_values(self, record: CommitRecord) -> None:
        for points, value in (
            (self._losses, record.loss),
            (self._grad_norms, record.grad_norm),
            (self._learning_rates, record.learning_rate),
        ):
            if math.isfinite(value):
                points.add(record.step, value)

    def history(self, now_s: float | None = None) -> History:
        """Return the history so far, up to `now_s` for an active run."""
        elapsed_s = max(self._elapsed_s, now_s or 0.0)
        return History(
            started=self._started,
            elapsed_s=elapsed_s,
            split=self._time.at(elapsed_s),
            rates=mean_rates(self._rates, elapsed_s),
            num_nodes=tuple(self._num_nodes),
            losses=thinned(self._losses.points),
            grad_norms=thinned(self._grad_norms.points),
            learning_rates=thinned(self._learning_rates.points),
            checkpoints=tuple(self._checkpoints),
            num_checkpoints=self._num_checkpoints,
            plans=tuple(self._plans),
            num_plans=len(self._num_nodes),
            script=self._script,
            generations=tuple(self._generations),
            num_generations=self._num_generations,
        )


class _Thinning:
    """Points in order. If there are too many, neighbours become their mean; the first point stays."""

    def __init__(self) -> None:
        self._means: list[tuple[float, float]] = []
        self._size = 1
        self._newest: list[tuple[float, float]] = []
        """Fewer than `_size` points, which have no mean yet."""
        self._first: tuple[float, float] | None = None

    def add(self, x: float, y: float) -> None:
        """Add a point, and forget those at `x` and after it. O(1) amortised."""
        # Steps that were lost come again, with other losses.
        for points in (self._newest, self._means):
            while points and points[-1][0] >= x:
                points.pop()
        if self._first is None or x <= self._first[0]:
            self._first = (float(x), y)
            return
        self._newest.append((float(x), y))
        if len(self._newest) == self._size:
            self._means.append(_mean(self._newest))
            self._newest.clear()
        if len(self._means) > 2 * _KEPT_POINTS:
            pairs = zip(self._means[::2], self._means[1::2], strict=False)
            # A mean without a partner has too few points for the new size.
            rest = self._means[len(self._means) // 2 * 2 :]
            self._means, self._size = [_mean(pair) for pair in pairs], 2 * self._size
            self._newest = [*rest, *self._newest]

    @property
    def points(self) -> list[tuple[float, float]]:
        return [*([] if self._first is None else [self._first]), *self._means, *self._newest]


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return math.fsum(x for x, _ in points) / len(points), math.fsum(y for _, y in points) / len(points)


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
    """Return the mean rates over at most `most` equal intervals."""
    if len(rates) <= most or elapsed_s <= 0:
        return tuple(rates)
    # Each rate is spread over the intervals that it overlaps, which keeps the integral: the number of tokens.
    width_s = elapsed_s / most
    amounts = [0.0] * most
    for since_s, until_s, rate in rates:
        first, last = int(since_s / width_s), min(most - 1, int(until_s / width_s))
        for index in range(first, last + 1):
            overlap_s = min(until_s, (index + 1) * width_s) - max(since_s, index * width_s)
            amounts[index] += rate * max(0.0, overlap_s)
    return tuple((i * width_s, (i + 1) * width_s, amount / width_s) for i, amount in enumerate(amounts))


def thinned(points: Sequence[tuple[float, float]], *, most: int = MAX_POINTS) -> tuple[tuple[float, float], ...]:
    """Return about `most` points at most: means of neighbours, but the first and the last stay."""
    if len(points) <= most:
        return tuple(points)
    size = math.ceil((len(points) - 2) / (most - 2))
    inner = [points[start : start + size] for start in range(1, len(points) - 1, size)]
    inner[-1] = inner[-1][: len(points) - 1 - (1 + size * (len(inner) - 1))]
    return (points[0], *(_mean(part) for part in inner if part), points[-1])
