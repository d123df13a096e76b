"""A failure trace: timed events on the nodes of a cluster.

A trace holds the events of the world, never a system's reactions. Both modes of the simulator play it on virtual nodes,
and `oobleck chaos` plays the same file on a real cluster.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from oobleck.errors import ConfigError
from oobleck.job import MAX_KINDS, MAX_NODES, check_kind_name
from oobleck.job.bounds import MAX_SECONDS

from .events import TraceEvent, event_nodes, event_to_json
from .state import ClusterState

MAX_EVENTS = 1_000_000
_LEAST_SECONDS = 1e-3


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A cluster, and its events in `duration_s` seconds. Raises ConfigError for an impossible trace."""

    duration_s: float
    nodes: tuple[str, ...]
    """All nodes that are ever present."""
    start: tuple[str, ...]
    events: tuple[TraceEvent, ...] = ()
    """In the order of time."""
    kinds: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The device name of each node, if there are several kinds of nodes."""
    domains: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The failure domain of nodes (a rack, a zone); others are one by themselves."""
    source: str = ""

    def __post_init__(self) -> None:
        if not _LEAST_SECONDS <= self.duration_s <= MAX_SECONDS:
            raise ConfigError(
                f"duration_s is {self.duration_s!r}; it must be a number of seconds from {_LEAST_SECONDS} to "
                f"{MAX_SECONDS:,.0f} (fifteen years)"
            )
        if not self.nodes:
            raise ConfigError("nodes is empty; a trace has at least one")
        for name, number, most in (("nodes", len(self.nodes), MAX_NODES), ("events", len(self.events), MAX_EVENTS)):
            if number > most:
                raise ConfigError(f"there are {number:,} {name}; a trace has at most {most:,}")
        for name, nodes in (("nodes", self.nodes), ("start", self.start)):
            if twice := [node for node, number in Counter(nodes).items() if number > 1]:
                raise ConfigError(f"{name} names {twice[0]!r} twice")
        if "" in self.nodes:
            raise ConfigError("nodes holds an empty name")
        for name, nodes in (("start", self.start), ("kinds", tuple(self.kinds)), ("domains", tuple(self.domains))):
            if unknown := sorted(set(nodes) - set(self.nodes)):
                raise ConfigError(f"{name} names {unknown[0]!r}, which is not among the trace's nodes")
        self._check_kinds()
        self._check_events()

    @property
    def most_nodes(self) -> int:
        """The most nodes that are present at once, and at least 1."""
        return max(1, *(count for _, count in self.counts))

    @cached_property
    def counts(self) -> tuple[tuple[float, int], ...]:
        """(seconds, present nodes from then on), from 0, one for each change."""
        cluster = ClusterState(self.start)
        counts = [(0.0, len(cluster.here))]
        for event in self.events:
            cluster.apply(event)
            if len(cluster.here) == counts[-1][1]:
                continue
            # Of several changes at one moment, the last one counts.
            if counts[-1][0] == event.t_s:
                counts.pop()
            counts.append((event.t_s, len(cluster.here)))
        return tuple(counts)

    def _check_kinds(self) -> None:
        kinds = sorted(set(self.kinds.values()))
        for kind in kinds:
            check_kind_name(kind)
        if len(kinds) > MAX_KINDS:
            raise ConfigError(f"there are {len(kinds)} kinds of nodes; a trace has at most {MAX_KINDS}")
        if self.kinds and (without := [node for node in self.nodes if node not in self.kinds]):
            raise ConfigError(f"node {without[0]!r} is of no kind; name that of each node, or none")

    def _check_events(self) -> None:
        cluster, known, before_s = ClusterState(self.start), frozenset(self.nodes), 0.0
        for index, event in enumerate(self.events):
            unknown = [name for name in event_nodes(event) if name not in known]
            if not (math.isfinite(event.t_s) and event.t_s >= 0):
                problem: str | None = f"t_s is {event.t_s!r}; it must be a number of seconds, at least 0"
            elif event.t_s < before_s:
                problem = f"time goes backwards: the event before is at {before_s:g} s"
            elif event.t_s > self.duration_s:
                problem = f"the trace ends at {self.duration_s:g} s"
            elif unknown:
                problem = f"{unknown[0]!r} is not among the trace's nodes"
            else:
                problem = cluster.problem(event)
            if problem is not None:
                raise ConfigError(f"event {index} {json.dumps(event_to_json(event))}: {problem}")
            cluster.apply(event)
            before_s = event.t_s
