"""A trace on a cluster of another size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from oobleck.errors import ConfigError

from .events import Partitioned, TraceEvent, event_nodes
from .state import ClusterState
from .trace import Trace

__all__ = ["with_nodes"]


def with_nodes(trace: Trace, num_nodes: int) -> Trace:
    """Return the trace of its first nodes only, or with healthy ones beside its own: `healthy0`, `healthy1`, …

    Raises ConfigError when none of the nodes that are left is ever there.
    """
    if num_nodes >= len(trace.nodes):
        more = tuple(f"healthy{number}" for number in range(num_nodes - len(trace.nodes)))
        return replace(trace, nodes=(*trace.nodes, *more), start=(*trace.start, *more))
    kept = frozenset(trace.nodes[:num_nodes])
    start = tuple(node for node in trace.start if node in kept)
    smaller = replace(
        trace,
        nodes=trace.nodes[:num_nodes],
        start=start,
        events=tuple(_possible(trace.events, kept, start)),
    )
    if max(count for _, count in smaller.counts) == 0:
        raise ConfigError(f"none of the first {num_nodes} nodes of the trace is ever there")
    return smaller


def _possible(events: tuple[TraceEvent, ...], kept: frozenset[str], start: tuple[str, ...]) -> Iterator[TraceEvent]:
    cluster = ClusterState(start)
    for event in events:
        named = event_nodes(event)
        inside = tuple(node for node in named if node in kept)
        less = replace(event, nodes=inside) if isinstance(event, Partitioned) and inside else event
        if bool(inside) == bool(named) and cluster.problem(less) is None:
            cluster.apply(less)
            yield less
