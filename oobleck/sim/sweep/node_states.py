"""Which nodes of a sweep are there, which of them the coordinator counts on, and which say nothing."""

from __future__ import annotations

from collections.abc import Iterable, Set

__all__ = ["NodeStates"]


class NodeStates:
    """What the trace has done to nodes, and what the coordinator knows of it."""

    def __init__(self, nodes: Iterable[str], start: Iterable[str]) -> None:
        self.here = set(start)
        self.lives = dict.fromkeys(nodes, 0)
        """How often each node came: what was meant for an earlier life of it is dropped."""
        self.members: dict[str, int] = {}
        """The nodes that the coordinator counts on, and in which of their lives."""
        self.silent: dict[str, int] = {}
        """Nodes that are gone, frozen or cut off, and are not known to be; each silence has a number."""
        self.mute: dict[str, int] = {}
        """Nodes whose agent is stopped while their workers train on; each silence has a number."""
        self.frozen: set[str] = set()
        self.cut: set[str] = set()

    @property
    def well(self) -> Set[str]:
        """The nodes that take part: the coordinator hears what they say."""
        return self.members.keys() - self.silent.keys()

    @property
    def absent(self) -> Set[str]:
        """The nodes that the coordinator does not listen to."""
        return self.lives.keys() - self.well

    @property
    def startable(self) -> list[str]:
        """The nodes that a job can be started on."""
        return [node for node in self.lives if node in self.here and node not in self.silent]

    def is_well(self, node: str) -> bool:
        return node in self.members and node not in self.silent

    def come(self, node: str) -> None:
        """A node is there, or there again: as another one than it was."""
        self.here.add(node)
        self.lives[node] += 1

    def go(self, node: str) -> None:
        """A node is gone, whatever was wrong with it before."""
        self.here.discard(node)
        self.mute.pop(node, None)
        self.frozen.discard(node)
        self.cut.discard(node)
