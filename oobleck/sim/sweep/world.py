"""The world of a sweep: its agenda, whether a master is running, and the states of its nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Set
from math import inf

from oobleck.sim.trace import ClusterState, Gone, Joined, TraceEvent


class Agenda:
    """Virtual time and its actions; those of one moment happen in the order of their insertion."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.blind_until_s = 0.0  # there is no master until then
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    @property
    def next_s(self) -> float:
        """When the next action is due; infinity if there is none."""
        return self._queue[0][0] if self._queue else inf

    @property
    def is_blind(self) -> bool:
        return self.now_s < self.blind_until_s

    def number(self) -> int:
        self._sequence += 1
        return self._sequence

    def at(self, t_s: float, action: Callable[[], None]) -> None:
        """Schedule an action at a time, or at once if that has passed."""
        heapq.heappush(self._queue, (max(t_s, self.now_s), self.number(), action))

    def when_seen(self, t_s: float, action: Callable[[], None]) -> None:
        """Schedule an action that needs a running master."""

        def act() -> None:
            # The master may be away at that moment too.
            if self.is_blind:
                self.when_seen(self.blind_until_s, action)
            else:
                action()

        self.at(t_s, act)

    def do_due(self) -> None:
        """Perform all actions that are due, including those that become due meanwhile."""
        while self._queue and self._queue[0][0] <= self.now_s:
            heapq.heappop(self._queue)[2]()


class NodeStates:
    """The states of nodes, and the coordinator's knowledge of them."""

    def __init__(self, nodes: Iterable[str], start: Iterable[str]) -> None:
        self._cluster = ClusterState(start)
        # How often each node joined: an action for an earlier life is dropped.
        self.lives = dict.fromkeys(nodes, 0)
        self.members: dict[str, int] = {}  # the nodes that the coordinator counts on, with their life
        # Nodes that are gone, frozen or cut off without the coordinator's notice; each silence has a number.
        self.silent: dict[str, int] = {}
        # Nodes whose agent is frozen while their workers train on; each silence has a number.
        self.mute: dict[str, int] = {}
        self.leaves_s: dict[str, float] = {}  # when a node with notice is to be taken away

    @property
    def here(self) -> Set[str]:
        return self._cluster.here

    @property
    def stuck(self) -> Set[str]:
        """The present nodes that the master cannot reach: frozen or cut off."""
        return self._cluster.frozen | self._cluster.cut

    @property
    def well(self) -> Set[str]:
        """The members that the coordinator hears."""
        return self.members.keys() - self.silent.keys() if self.silent else self.members.keys()

    def startable(self, now_s: float) -> list[str]:
        """Return the nodes on which a job can start; one with notice may stay in the end."""
        here = [node for node in self.lives if node in self.here and node not in self.silent]
        return [node for node in here if self.leaves_s.get(node, 0.0) <= now_s]

    def is_well(self, node: str) -> bool:
        return node in self.members and node not in self.silent

    def apply(self, event: TraceEvent) -> tuple[str, ...]:
        """Apply an event of the trace; return the nodes that it changes, in order."""
        if isinstance(event, Joined):
            self.lives[event.node] += 1
            self.leaves_s.pop(event.node, None)
        elif isinstance(event, Gone):
            self.mute.pop(event.node, None)
        return self._cluster.apply(event)
