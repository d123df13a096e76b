"""A trace in numbers: the present nodes, and the frequency, size and length of losses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from .events import Gone, Joined
from .trace import Trace

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """The output of `oobleck trace info`."""

    source: str
    duration_s: float
    num_nodes: int
    num_at_start: int
    mean_nodes: float
    fewest_nodes: int
    most_nodes: int
    events: Mapping[str, int]
    losses_per_node_hour: float
    mean_time_between_losses_s: float | None
    """For the whole cluster; None without losses."""
    losses_at_once: Mapping[int, int]
    """How often each number of nodes was lost at the same moment."""
    away_s_median: float | None
    """From a loss to the same node's return; None if none returns."""

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"losses_at_once": {str(size): count for size, count in self.losses_at_once.items()}}


def facts_of(trace: Trace) -> TraceFacts:
    """Summarise a trace; O(events · log(events))."""
    # The last number of nodes lasts until the end.
    counts = [*trace.counts, (trace.duration_s, trace.counts[-1][1])]
    node_s = math.fsum(count * (until_s - since_s) for (since_s, count), (until_s, _) in pairwise(counts))
    losses = [event for event in trace.events if isinstance(event, Gone)]
    left_s: dict[str, float] = {}
    away_s: list[float] = []
    for event in trace.events:
        if isinstance(event, Gone):
            left_s[event.node] = event.t_s
        elif isinstance(event, Joined) and event.node in left_s:
            away_s.append(event.t_s - left_s.pop(event.node))
    return TraceFacts(
        source=trace.source,
        duration_s=trace.duration_s,
        num_nodes=len(trace.nodes),
        num_at_start=len(trace.start),
        mean_nodes=node_s / trace.duration_s,
        fewest_nodes=min(count for _, count in trace.counts),
        most_nodes=max(count for _, count in trace.counts),
        events=dict(sorted(Counter(event.kind for event in trace.events).items())),
        losses_per_node_hour=len(losses) / node_s * _HOUR_S if node_s else 0.0,
        mean_time_between_losses_s=trace.duration_s / len(losses) if losses else None,
        losses_at_once=dict(sorted(Counter(Counter(event.t_s for event in losses).values()).items())),
        away_s_median=median(away_s) if away_s else None,
    )
