"""Simulated runs for programs: one call for a run, and one for many of them with a confidence interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

from oobleck.errors import ConfigError

from .cluster import run_cluster
from .costs import Outcome, outcome_of_journal
from .policies import POLICIES, PolicySettings
from .sweep import SweepSettings, most_steps
from .trace import Trace


def simulate(
    trace: Trace,
    settings: SweepSettings,
    policy: str = "oobleck",
    *,
    mode: Literal["sweep", "cluster"] = "sweep",
    report: Callable[[float], None] = lambda _: None,
) -> Outcome:
    """Play a trace with one of `POLICIES` and return what comes of it; the same arguments give the same outcome.

    `mode="cluster"` runs the real master and agents on virtual nodes, for policy `oobleck`. `report` receives the
    simulated seconds as progress. Raises ConfigError for an unknown policy, PlanningError where all nodes do not hold
    the model.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
    if mode == "sweep" or policy != "oobleck":
        return POLICIES[policy](trace, PolicySettings(job=settings, report=report))
    run = run_cluster(
        trace,
        job=settings.job(most_steps(trace, settings), is_timed=True),
        profile=settings.profile,
        seed=settings.seed,
        devices_per_node=settings.devices_per_node,
        kinds=settings.kinds,
        costs=settings.costs,
        observe=lambda entry: report(entry.t_s),
    )
    return outcome_of_journal(run.entries, policy=policy, about="Oobleck: the real master and agents on virtual nodes")


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """The outcomes of one policy on several traces."""

    policy: str
    outcomes: tuple[Outcome, ...]

    @cached_property
    def samples_per_s(self) -> Mean:
        return Mean.of(outcome.samples_per_s for outcome in self.outcomes)

    @cached_property
    def goodput(self) -> Mean:
        return Mean.of(outcome.summary.goodput for outcome in self.outcomes)

    @cached_property
    def steps_lost(self) -> Mean:
        return Mean.of(float(outcome.summary.steps_lost) for outcome in self.outcomes)

    def to_dict(self) -> dict[str, object]:
        """Return the means and the single values, for JSON; the outcomes have a `to_dict` of their own."""
        return {
            name: {"mean": mean.value, "half_width": mean.half_width, "values": list(mean.values)}
            for name in ("samples_per_s", "goodput", "steps_lost")
            for mean in (getattr(self, name),)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean, and half the width of its 95 % confidence interval; None for a single value."""

    value: float
    half_width: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        known = tuple(values)
        half_width = _student(len(known) - 1) * stdev(known) / sqrt(len(known)) if len(known) > 1 else None
        return cls(value=fmean(known), half_width=half_width, values=known)

    def __str__(self) -> str:
        if self.half_width is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} ± {float(f'{self.half_width:.2g}'):g}"


def repeat(
    make_trace: Callable[[int], Trace], settings: SweepSettings, policy: str = "oobleck", *, seeds: Iterable[int]
) -> Repeated:
    """Simulate one trace for each seed. Raises what `simulate` and `make_trace` raise."""
    outcomes = tuple(simulate(make_trace(seed), settings, policy) for seed in seeds)
    if not outcomes:
        raise ConfigError("seeds is empty; a mean needs at least one")
    return Repeated(policy=policy, outcomes=outcomes)


# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_QUANTILES_MORE = ((15, 2.131), (20, 2.086), (30, 2.042), (60, 2.0), (120, 1.98))


def _student(freedom: int) -> float:
    """Return the quantile for at most these degrees of freedom, so that no interval is too narrow."""
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    return next((quantile for least, quantile in reversed(_QUANTILES_MORE) if freedom >= least), _QUANTILES[-1])
