"""A trace on a cluster of another size, or with spare nodes that replace lost ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle

from oobleck.errors import ConfigError

from .events import Gone, Joined, Partitioned, TraceEvent, event_nodes
from .state import ClusterState
from .trace import Trace


def with_kinds(trace: Trace, kinds: Sequence[str]) -> Trace:
    """Return the trace with one node for each of `kinds`, resized by `with_nodes`."""
    resized = with_nodes(replace(trace, kinds={}), len(kinds))
    return replace(resized, kinds=dict(zip(resized.nodes, kinds, strict=True)))


def with_nodes(trace: Trace, num_nodes: int) -> Trace:
    """Return the trace of its first nodes only, or with healthy ones added: `healthy0`, `healthy1`, …

    Raises ConfigError if none of the remaining nodes is ever present, or the kinds of added ones are unknown.
    """
    if num_nodes >= len(trace.nodes):
        more = tuple(f"healthy{number}" for number in range(num_nodes - len(trace.nodes)))
        if more and trace.kinds:
            raise ConfigError(f"the trace has {len(trace.nodes)} nodes of kinds; say of which kinds {num_nodes} are")
        return replace(trace, nodes=(*trace.nodes, *more), start=(*trace.start, *more))
    smaller = of_nodes(trace, trace.nodes[:num_nodes])
    if max(count for _, count in smaller.counts) == 0:
        raise ConfigError(f"none of the first {num_nodes} nodes of the trace is ever there")
    return smaller


def of_nodes(trace: Trace, nodes: Sequence[str]) -> Trace:
    """Return what a trace holds about some of its nodes."""
    kept = frozenset(nodes)
    start = tuple(node for node in trace.start if node in kept)
    return replace(
        trace,
        nodes=tuple(nodes),
        start=start,
        events=tuple(_possible(trace.events, kept, start)),
        kinds={node: kind for node, kind in trace.kinds.items() if node in kept},
        domains={node: domain for node, domain in trace.domains.items() if node in kept},
    )


def _possible(events: tuple[TraceEvent, ...], kept: frozenset[str], start: tuple[str, ...]) -> Iterator[TraceEvent]:
    cluster = ClusterState(start)
    for event in events:
        named = event_nodes(event)
        inside = tuple(node for node in named if node in kept)
        less = replace(event, nodes=inside) if isinstance(event, Partitioned) and inside else event
        # An event of left-out nodes is dropped, and one that makes no sense without such an event, as a heal.
        if bool(inside) == bool(named) and cluster.problem(less) is None:
            cluster.apply(less)
            yield less


def with_spares(trace: Trace, num_spares: int, *, activation_s: float) -> Trace:
    """Return the trace with spares added: `spare0`, `spare1`, …, of each kind in turn.

    A spare joins `activation_s` seconds after a loss. A replaced node that returns becomes a spare. So no run waits for
    a repair while there are spares, and every policy has the same ones.
    """
    if not num_spares:
        return trace
    names = tuple(f"spare{number}" for number in range(num_spares))
    events = tuple(_Reserve(trace, names, activation_s).play())
    in_turn = cycle(dict.fromkeys(trace.kinds.values())) if trace.kinds else ()
    kinds = {**trace.kinds, **dict(zip(names, in_turn, strict=False))}
    return replace(trace, nodes=(*trace.nodes, *names), events=events, kinds=kinds)


class _Reserve:
    """The spare nodes. Of their own events, only losses count."""

    def __init__(self, trace: Trace, spares: tuple[str, ...], activation_s: float) -> None:
        self._trace = trace
        self._pool = deque(spares)
        self._coming: deque[tuple[float, str]] = deque()
        self._replaced: set[str] = set()  # lost nodes that become spares when they return
        self._seen = ClusterState(trace.start)  # the cluster without spares
        self._activation_s = activation_s

    def play(self) -> Iterator[TraceEvent]:
        for event in self._trace.events:
            yield from self._arrivals(event.t_s)
            if self._happens(event):
                self._seen.apply(event)
                yield event
                if isinstance(event, Gone) and self._pool:
                    self._replaced.add(event.node)
                    self._coming.append((event.t_s + self._activation_s, self._pool.popleft()))
        yield from self._arrivals(self._trace.duration_s)

    def _arrivals(self, until_s: float) -> Iterator[TraceEvent]:
        # All take equally long to activate, so the first lost is the first replaced.
        while self._coming and self._coming[0][0] <= until_s:
            t_s, node = self._coming.popleft()
            joined = Joined(t_s=t_s, node=node)
            self._seen.apply(joined)
            yield joined

    def _happens(self, event: TraceEvent) -> bool:
        """Return whether an event still happens with spares; apply it to the spares if it is theirs."""
        match event:
            case Joined(node=node) if node in self._replaced:
                self._replaced.discard(node)
                self._pool.append(node)
                return False
            case Gone(node=node) if node in self._pool or any(node == coming for _, coming in self._coming):
                self._pool = deque(each for each in self._pool if each != node)
                self._coming = deque(each for each in self._coming if each[1] != node)
                self._replaced.add(node)
                return False
            case _:
                return self._seen.problem(event) is None
