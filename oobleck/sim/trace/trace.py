"""A failure trace: what happens to the nodes of a cluster, and when.

A trace says what the world does, never what a system makes of it. The simulator plays it on virtual nodes in
either mode, and the same file can be played on a real cluster.
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
    """A cluster, and what happens to it in `duration_s` seconds. Raises ConfigError for what cannot be."""

    duration_s: float
    nodes: tuple[str, ...]
    """All nodes that are ever there."""
    start: tuple[str, ...]
    events: tuple[TraceEvent, ...] = ()
    """In the order of time."""
    kinds: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What the devices of nodes are called, where there are several kinds of nodes."""
    source: str = ""

    def __post_init__(self) -> None:
        if not _LEAST_SECONDS <= self.duration_s <= MAX_SECONDS:
            raise ConfigError(
                f"duration_s is {self.duration_s!r}; it must be a number of seconds from {_LEAST_SECONDS} to "
                f"{MAX_SECONDS:,.0f} (fifteen years)"
            )
        for name, number, most in (("nodes", len(self.nodes), MAX_NODES), ("events", len(self.events), MAX_EVENTS)):
            if number > most:
                raise ConfigError(f"there are {number:,} {name}; a trace has at most {most:,}")
        for name, nodes in (("nodes", self.nodes), ("start", self.start)):
            if twice := [node for node, number in Counter(nodes).items() if number > 1]:
                raise ConfigError(f"{name} names {twice[0]!r} twice")
        if "" in self.nodes:
            raise ConfigError("nodes holds an empty name")
        if unknown := sorted(set(self.start) - set(self.nodes)):
            raise ConfigError(f"start names {unknown[0]!r}, which is not among the trace's nodes")
        if unknown := sorted(self.kinds.keys() - set(self.nodes)):
            raise ConfigError(f"kinds names {unknown[0]!r}, which is not among the trace's nodes")
        self._check_kinds()
        self._check_events()

    @cached_property
    def counts(self) -> tuple[tuple[float, int], ...]:
        """(seconds, nodes there from then on), from 0, one for each change."""
        cluster = ClusterState(self.start)
        counts = [(0.0, len(cluster.here))]
        for event in self.events:
            cluster.apply(event)
            if len(cluster.here) == counts[-1][1]:
                continue
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
            problem = (
                self._time_problem(event.t_s, before_s)
                or (f"{unknown[0]!r} is not among the trace's nodes" if unknown else None)
                or cluster.problem(event)
            )
            if problem is not None:
                raise ConfigError(f"event {index} {json.dumps(event_to_json(event))}: {problem}")
            cluster.apply(event)
            before_s = event.t_s

    def _time_problem(self, t_s: float, before_s: float) -> str | None:
        if not (math.isfinite(t_s) and t_s >= 0):
            return f"t_s is {t_s!r}; it must be a number of seconds, at least 0"
        if t_s < before_s:
            return f"time goes backwards: the event before is at {before_s:g} s"
        if t_s > self.duration_s:
            return f"the trace ends at {self.duration_s:g} s"
        return None
