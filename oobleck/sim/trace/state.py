"""The states of a cluster's nodes, and the effects of a trace's events on them.

    state of a node     may happen to it                                        leads to
    away                joined                                                  here
    here                lost, agent_crashed                                     away
    here                frozen                                                  frozen
    here                slow, worker_crashed, fork_server_crashed,              here
                        agent_frozen, notice
    frozen              thawed                                                  here
    frozen              lost                                                    away

A present node, frozen or not, may also be cut off until all partitions end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from . import events


class ClusterState:
    """The nodes after the events so far; only `apply` changes them."""

    def __init__(self, start: Iterable[str]) -> None:
        self.here = set(start)  # present nodes; the others are away
        self.frozen: set[str] = set()
        self.cut: set[str] = set()  # from the other nodes and from the master
        self.factors: dict[str, float] = {}  # the step times of slow nodes, relative to the usual ones
        self._is_partitioned = False

    @property
    def well(self) -> set[str]:
        """The nodes that can take part."""
        return self.here - self.frozen - self.cut

    def problem(self, event: events.TraceEvent) -> str | None:
        """Return why an event cannot happen next, or None."""
        match event:
            case events.MasterCrashed() | events.MasterFrozen() | events.Partitioned():
                return None
            case events.Healed():
                return None if self._is_partitioned else "there is no partition"
            case events.Joined(node=node):
                return f"{node} is there already" if node in self.here else None
            # All further events strike a present node.
            case _ if event.node not in self.here:
                return f"{event.node} is not there"
            case events.Lost():
                return None
            case events.Thawed(node=node):
                return None if node in self.frozen else f"{node} is not frozen"
            case _:
                return f"{event.node} is frozen" if event.node in self.frozen else None

    def apply(self, event: events.TraceEvent) -> tuple[str, ...]:
        """Apply an event; return the nodes that it changes, in order."""
        match event:
            case events.Joined(node=node):
                self.here.add(node)
            case events.Gone(node=node):
                for group in (self.here, self.frozen, self.cut):
                    group.discard(node)
                self.factors.pop(node, None)
            case events.Frozen(node=node):
                self.frozen.add(node)
            case events.Thawed(node=node):
                self.frozen.discard(node)
            case events.Slowed(node=node, factor=factor):
                self.factors[node] = factor
            case events.Stays(node=node):
                pass
            case events.MasterCrashed() | events.MasterFrozen():
                return ()
            # Nodes keep their states: only the network between them fails.
            case events.Partitioned(spares_master=True):
                self._is_partitioned = True
                return ()
            case events.Partitioned(nodes=nodes):
                self._is_partitioned = True
                newly_cut = self.here.intersection(nodes) - self.cut
                self.cut |= newly_cut
                return tuple(sorted(newly_cut))
            case events.Healed():
                self._is_partitioned = False
                healed, self.cut = self.cut, set()
                return tuple(sorted(healed))
            case _:
                assert_never(event)
        return (node,)
