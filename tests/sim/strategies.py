"""Failure traces drawn by hypothesis: always possible, otherwise wild."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from oobleck.sim.trace import (
    AgentFrozen,
    Frozen,
    Gone,
    Healed,
    Joined,
    Lost,
    MasterCrashed,
    MasterFrozen,
    Noticed,
    Partitioned,
    Slowed,
    Thawed,
    Trace,
    TraceEvent,
)
from oobleck.sim.trace.events import event_types

_ANY = tuple(event_types().values())


@st.composite
def traces(
    draw: st.DrawFn,
    *,
    min_nodes: int = 1,
    max_nodes: int = 6,
    max_events: int = 12,
    duration_s: float = 1000.0,
    kinds: Sequence[type[TraceEvent]] = _ANY,
    times: st.SearchStrategy[list[float]] | None = None,
    all_start: bool = False,
) -> Trace:
    """A trace of `node0`, `node1`, … with events of the kinds given, each possible where it stands.

    `times` draws the events' seconds, in order. With `all_start`, every node is there at the beginning.
    """
    nodes = tuple(f"node{number}" for number in range(draw(st.integers(min_nodes, max_nodes))))
    start = nodes if all_start else tuple(node for node in nodes if draw(st.booleans())) or nodes[:1]
    anywhere = st.lists(st.floats(0, duration_s), max_size=max_events).map(sorted)
    here, frozen, partitioned = set(start), set[str](), False
    events: list[TraceEvent] = []
    for t_s in draw(anywhere if times is None else times):
        well, away = sorted(here - frozen), sorted(set(nodes) - here)
        targets = {
            Lost: sorted(here), Joined: away, Thawed: sorted(frozen), MasterCrashed: nodes, MasterFrozen: nodes,
            Partitioned: nodes, Healed: nodes if partitioned else (),
        }  # fmt: skip
        possible = [kind for kind in kinds if targets.get(kind, well)]
        if not possible:
            continue
        kind = draw(st.sampled_from(possible))
        node = draw(st.sampled_from(targets.get(kind, well)))
        if kind is Slowed:
            events.append(Slowed(t_s=t_s, node=node, factor=draw(st.floats(1, 10))))
        elif kind is Noticed:
            events.append(Noticed(t_s=t_s, node=node, grace_s=draw(st.floats(0, 120))))
        elif kind is MasterCrashed:
            events.append(MasterCrashed(t_s=t_s, down_s=draw(st.floats(0, 60))))
        elif kind is MasterFrozen:
            events.append(MasterFrozen(t_s=t_s, frozen_s=draw(st.floats(0, 60))))
        elif kind is AgentFrozen:
            events.append(AgentFrozen(t_s=t_s, node=node, frozen_s=draw(st.floats(0, 60))))
        elif kind is Partitioned:
            events.append(Partitioned(t_s=t_s, nodes=tuple(sorted(draw(st.sets(st.sampled_from(nodes), min_size=1))))))
            partitioned = True
        elif kind is Healed:
            events.append(Healed(t_s=t_s))
            partitioned = False
        else:
            events.append(kind(t_s=t_s, node=node))
        if issubclass(kind, Gone):
            here.discard(node)
            frozen.discard(node)
        elif kind is Joined:
            here.add(node)
        elif kind is Frozen:
            frozen.add(node)
        elif kind is Thawed:
            frozen.discard(node)
    return Trace(duration_s=duration_s, nodes=nodes, start=start, events=tuple(events), source=draw(st.text()))
