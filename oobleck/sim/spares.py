"""Spare nodes, as a change of the trace: when a node is lost, one that stands by joins in its place."""

from __future__ import annotations

from collections import deque

from .trace import AgentCrashed, Joined, Lost, Trace, TraceEvent

__all__ = ["with_spares"]


def with_spares(trace: Trace, num_spares: int, *, activation_s: float) -> Trace:
    """Return the trace with spares beside its nodes: `spare0`, `spare1`, …

    At a loss the next spare joins, `activation_s` seconds later. A node that was replaced and comes back stands by
    from then on. So nobody waits for a repair while there are spares, and every policy has the same ones.
    """
    if not num_spares:
        return trace
    pool = deque(f"spare{number}" for number in range(num_spares))
    names = tuple(pool)
    replaced: set[str] = set()
    pending: deque[tuple[float, str]] = deque()
    events: list[TraceEvent] = []
    for event in trace.events:
        while pending and pending[0][0] <= event.t_s:
            t_s, node = pending.popleft()
            events.append(Joined(t_s=t_s, node=node))
        match event:
            case Joined(node=node) if node in replaced:
                replaced.discard(node)
                pool.append(node)
                continue
            case Lost(t_s=t_s, node=node) | AgentCrashed(t_s=t_s, node=node) if pool:
                replaced.add(node)
                pending.append((t_s + activation_s, pool.popleft()))
            case _:
                pass
        events.append(event)
    events += [Joined(t_s=t_s, node=node) for t_s, node in pending if t_s <= trace.duration_s]
    return Trace(
        duration_s=trace.duration_s,
        nodes=(*trace.nodes, *names),
        start=trace.start,
        events=tuple(events),
        source=trace.source,
    )
