"""A trace on a cluster of another size."""

from __future__ import annotations

from dataclasses import replace

from oobleck.errors import ConfigError

from .trace import Healed, MasterCrashed, MasterFrozen, Partitioned, Trace, TraceEvent

__all__ = ["with_nodes"]


def with_nodes(trace: Trace, num_nodes: int) -> Trace:
    """Return the trace of its first nodes only, or with healthy ones beside its own: `healthy0`, `healthy1`, …

    Raises ConfigError when none of the nodes that are left is ever there.
    """
    if num_nodes >= len(trace.nodes):
        more = tuple(f"healthy{number}" for number in range(num_nodes - len(trace.nodes)))
        return replace(trace, nodes=(*trace.nodes, *more), start=(*trace.start, *more))
    kept = frozenset(trace.nodes[:num_nodes])
    smaller = replace(
        trace,
        nodes=trace.nodes[:num_nodes],
        start=tuple(node for node in trace.start if node in kept),
        events=tuple(_kept_events(trace.events, kept)),
    )
    if max(count for _, count in smaller.counts) == 0:
        raise ConfigError(f"none of the first {num_nodes} nodes of the trace is ever there")
    return smaller


def _kept_events(events: tuple[TraceEvent, ...], kept: frozenset[str]) -> list[TraceEvent]:
    found: list[TraceEvent] = []
    is_partitioned = False
    for event in events:
        match event:
            case MasterCrashed() | MasterFrozen():
                found.append(event)
            case Healed():
                if is_partitioned:
                    found.append(event)
                is_partitioned = False
            case Partitioned(nodes=nodes):
                if inside := tuple(node for node in nodes if node in kept):
                    found.append(replace(event, nodes=inside))
                    is_partitioned = True
            case _:
                if event.node in kept:
                    found.append(event)
    return found
