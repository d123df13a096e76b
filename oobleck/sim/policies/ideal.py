"""How far a run is from one that failures cost nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from oobleck.control.journal import JournalEntry, PlanAdopted, StepsDone
from oobleck.sim.trace import Trace

from .throughput import Throughput


def share_of_ideal(journal: Iterable[JournalEntry], trace: Trace, throughput: Throughput) -> float:
    """Return committed steps over those that the nodes there would have made at every moment, without any overhead.

    From the first plan of a sweep's journal to its last committed step, so that neither a start nor a step that the
    trace cuts off counts; 0 without one. `throughput` says how fast so many nodes train.
    """
    entries = tuple(journal)
    began_s = next((entry.t_s for entry in entries if isinstance(entry, PlanAdopted)), None)
    last = next((entry for entry in reversed(entries) if isinstance(entry, StepsDone)), None)
    if began_s is None or last is None:
        return 0.0
    ideal = 0.0
    for (since_s, count), (until_s, _) in pairwise((*trace.counts, (trace.duration_s, 0))):
        length_s = min(until_s, last.t_s) - max(since_s, began_s)
        step_s = throughput.step_s(count)
        if length_s > 0 and step_s is not None:
            ideal += length_s / step_s
    return last.record.step / ideal
