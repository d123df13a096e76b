"""How often a job writes checkpoints by default: Young and Daly's interval for the losses of a trace."""

from __future__ import annotations

from itertools import groupby
from math import inf, sqrt

from oobleck.sim.trace import Frozen, Gone, Trace, WorkerCrashed


def daly_interval_s(saving_s: float, mean_time_to_loss_s: float) -> float:
    """Return the seconds of training between checkpoints that waste least, if each stops training for `saving_s`.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37; its
    first term is Young's (1974).
    """
    if mean_time_to_loss_s == inf:
        return inf
    if saving_s >= 2 * mean_time_to_loss_s:
        return mean_time_to_loss_s
    share = saving_s / (2 * mean_time_to_loss_s)
    return sqrt(2 * saving_s * mean_time_to_loss_s) * (1 + sqrt(share) / 3 + share / 9) - saving_s


def mean_time_to_loss_s(trace: Trace, *, at_least: int = 1) -> float:
    """Return the trace's mean seconds between losses of `at_least` nodes at once; infinity if there are none."""
    lost = (event for event in trace.events if isinstance(event, Gone | Frozen | WorkerCrashed))
    number = sum(len({event.node for event in at_once}) >= at_least for _, at_once in groupby(lost, lambda e: e.t_s))
    return trace.duration_s / number if number else inf
