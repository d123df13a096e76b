"""Traces of nodes that join and leave, from sources that name nodes, or only count them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from oobleck.errors import ConfigError

from .events import Joined, Lost, TraceEvent
from .trace import MAX_EVENTS, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    t_s: float
    node: str
    joins: bool
    where: str
    """The place in the source, for errors: "line 7"."""


def trace_of_changes(changes: Sequence[Change], *, source: str, duration_s: float | None = None) -> Trace:
    """Make a trace of named nodes; those that join at the very beginning are present at the start.

    The trace ends `duration_s` seconds after its beginning, or with its last change. Raises ConfigError, with the
    place, for a node that joins twice or leaves while absent.
    """
    if not changes:
        raise ConfigError("no node ever joins or leaves")
    # Time begins with a source's first entry, whatever that one's clock shows.
    begin_s = changes[0].t_s
    nodes: dict[str, None] = {}
    here: set[str] = set()
    start: list[str] = []
    events: list[TraceEvent] = []
    now_s = begin_s
    for change in changes:
        if change.t_s < now_s:
            raise ConfigError(f"{change.where}: time goes backwards")
        now_s = change.t_s
        if change.joins == (change.node in here):
            state = "joins, but is present already" if change.joins else "leaves, but is not present"
            raise ConfigError(f"{change.where}: {change.node} {state}")
        nodes.setdefault(change.node)
        (here.add if change.joins else here.discard)(change.node)
        if change.joins and change.t_s == begin_s and not events:
            start.append(change.node)
        else:
            kind = Joined if change.joins else Lost
            events.append(kind(t_s=change.t_s - begin_s, node=change.node))
    last_s = changes[-1].t_s - begin_s
    return Trace(
        duration_s=max(last_s, duration_s or last_s),
        nodes=tuple(nodes),
        start=tuple(start),
        events=tuple(events),
        source=source,
    )


def trace_of_counts(counts: Iterable[tuple[float, int]], *, seed: int, source: str, duration_s: float) -> Trace:
    """Make a trace of (seconds, present nodes from then on); the seed draws the nodes that leave."""
    rng = random.Random(seed)
    here: list[int] = []
    # A heap: the first absent one of `node0`, `node1`, … joins, since spot instances have no lasting identity.
    away: list[int] = []
    start: tuple[str, ...] | None = None
    events: list[TraceEvent] = []
    most = 0
    begin_s = 0.0
    for t_s, count in counts:
        if start is None:
            here = list(range(count))
            start, most, begin_s = tuple(f"node{number}" for number in here), count, t_s
            continue
        while len(here) > count:
            number = here.pop(rng.randrange(len(here)))
            heappush(away, number)
            events.append(Lost(t_s=t_s - begin_s, node=f"node{number}"))
        while len(here) < count:
            number = heappop(away) if away else most
            most = max(most, number + 1)
            here.append(number)
            events.append(Joined(t_s=t_s - begin_s, node=f"node{number}"))
        if len(events) > MAX_EVENTS:
            raise ConfigError(
                f"more than {MAX_EVENTS:,} nodes join and leave until {t_s:,.0f} s; a trace has at most as many events"
            )
    if start is None or not most:
        raise ConfigError("no node is ever present")
    return Trace(
        duration_s=duration_s - begin_s,
        nodes=tuple(f"node{number}" for number in range(most)),
        start=start,
        events=tuple(events),
        source=source,
    )
