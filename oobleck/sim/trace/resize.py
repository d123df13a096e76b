"""A trace on a cluster of another size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from oobleck.errors import ConfigError

from .events import Partitioned, TraceEvent, event_nodes
from .state import ClusterState
from .trace import Trace


def with_kinds(trace: Trace, kinds: Sequence[str]) -> Trace:
    """Return the trace with as many nodes as there are `kinds`, as `with_nodes` does, each of its kind."""
    resized = with_nodes(replace(trace, kinds={}), len(kinds))
    return replace(resized, kinds=dict(zip(resized.nodes, kinds, strict=True)))


def with_nodes(trace: Trace, num_nodes: int) -> Trace:
    """Return the trace of its first nodes only, or with healthy ones beside its own: `healthy0`, `healthy1`, …

    Raises ConfigError when none of the nodes that are left is ever there, and where the kinds of more are not known.
    """
    if num_nodes >= len(trace.nodes):
        more = tuple(f"healthy{number}" for number in range(num_nodes - len(trace.nodes)))
        if more and trace.kinds:
            raise ConfigError(f"the trace has {len(trace.nodes)} nodes of kinds; say of which kinds {num_nodes} are")
        return replace(trace, nodes=(*trace.nodes, *more), start=(*trace.start, *more))
    kept = frozenset(trace.nodes[:num_nodes])
    start = tuple(node for node in trace.start if node in kept)
    smaller = replace(
        trace,
        nodes=trace.nodes[:num_nodes],
        start=start,
        events=tuple(_possible(trace.events, kept, start)),
        kinds={node: kind for node, kind in trace.kinds.items() if node in kept},
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
