"""Which nodes of a sweep are there, which of them the coordinator counts on, and which say nothing."""

from __future__ import annotations

from collections.abc import Iterable, Set

from oobleck.sim.trace import ClusterState, Gone, Joined, TraceEvent


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
        """The nodes that are there, in whatever state."""
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
