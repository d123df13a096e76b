"""A trace in numbers: how many nodes there are when, how often they fail, how many at once, for how long."""

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
    """What `oobleck trace info` shows."""

    source: str
    duration_s: float
    num_nodes: int
    num_at_start: int
    mean_nodes: float
    """There on average, over time."""
    fewest_nodes: int
    most_nodes: int
    events: Mapping[str, int]
    """By kind."""
    losses_per_node_hour: float
    mean_time_between_losses_s: float | None
    """Of the whole cluster; None without losses."""
    losses_at_once: Mapping[int, int]
    """Nodes lost at the same moment -> how often."""
    away_s_median: float | None
    """From a loss to the same node's return; None where none returns."""

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"losses_at_once": {str(size): count for size, count in self.losses_at_once.items()}}


def facts_of(trace: Trace) -> TraceFacts:
    """Sum up a trace; O(events · log(events))."""
    counts = [*trace.counts, (trace.duration_s, trace.counts[-1][1])]
    node_s = math.fsum(count * (until_s - since_s) for (since_s, count), (until_s, _) in pairwise(counts))
    losses = [event for event in trace.events if isinstance(event, Gone)]
    away_s = _away_s(trace)
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


def _away_s(trace: Trace) -> list[float]:
    left_s: dict[str, float] = {}
    away_s: list[float] = []
    for event in trace.events:
        match event:
            case Gone(t_s=t_s, node=node):
                left_s[node] = t_s
            case Joined(t_s=t_s, node=node) if node in left_s:
                away_s.append(t_s - left_s.pop(node))
            case _:
                pass
    return away_s
