"""The world of a sweep: what is to happen when, whether a master is there to see it, and how its nodes are."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Set
from math import inf

from oobleck.sim.trace import ClusterState, Gone, Joined, TraceEvent


class Agenda:
    """Virtual time, and the actions that it leads to; those of one moment in the order they were put in."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.blind_until_s = 0.0
        """Until then there is no master."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    @property
    def next_s(self) -> float:
        """When something is due next; infinity for never."""
        return self._queue[0][0] if self._queue else inf

    @property
    def is_blind(self) -> bool:
        return self.now_s < self.blind_until_s

    def number(self) -> int:
        """Return a number that nothing else has."""
        self._sequence += 1
        return self._sequence

    def at(self, t_s: float, action: Callable[[], None]) -> None:
        """Do something at a time, or at once if that has passed."""
        heapq.heappush(self._queue, (max(t_s, self.now_s), self.number(), action))

    def when_seen(self, t_s: float, action: Callable[[], None]) -> None:
        """Do something that a master has to be there for."""

        def act() -> None:
            if self.is_blind:
                self.when_seen(self.blind_until_s, action)
            else:
                action()

        self.at(t_s, act)

    def do_due(self) -> None:
        """Do all that is due by now, what becomes due by it included."""
        while self._queue and self._queue[0][0] <= self.now_s:
            heapq.heappop(self._queue)[2]()


class NodeStates:
    """What the trace has done to nodes, and what the coordinator knows of it."""

    def __init__(self, nodes: Iterable[str], start: Iterable[str]) -> None:
        self._cluster = ClusterState(start)
        self.lives = dict.fromkeys(nodes, 0)
        """How often each node came: what was meant for an earlier life of it is dropped."""
        self.members: dict[str, int] = {}
        """The nodes that the coordinator counts on, and in which of their lives."""
        self.silent: dict[str, int] = {}
        """Nodes that are gone, frozen or cut off, and are not known to be; each silence has a number."""
        self.mute: dict[str, int] = {}
        """Nodes whose agent is stopped while their workers train on; each silence has a number."""

    @property
    def here(self) -> Set[str]:
        return self._cluster.here

    @property
    def stuck(self) -> Set[str]:
        """The nodes that are there and that cannot be heard: frozen or cut off."""
        return self._cluster.frozen | self._cluster.cut

    @property
    def well(self) -> Set[str]:
        """The nodes that take part: the coordinator hears what they say."""
        return self.members.keys() - self.silent.keys()

    @property
    def startable(self) -> list[str]:
        """The nodes that a job can be started on."""
        return [node for node in self.lives if node in self.here and node not in self.silent]

    def is_well(self, node: str) -> bool:
        return node in self.members and node not in self.silent

    def apply(self, event: TraceEvent) -> tuple[str, ...]:
        """Let an event of the trace happen; return the nodes for which it changes something, in order."""
        match event:
            case Joined(node=node):  # as another one than it was
                self.lives[node] += 1
            case Gone(node=node):
                self.mute.pop(node, None)
            case _:
                pass
        return self._cluster.apply(event)
