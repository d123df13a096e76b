"""The master's ports: everything that it may ask of the world, and what decides for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from oobleck.control.events import Command, Event
from oobleck.control.journal import JournalEntry
from oobleck.control.protocol import FromAgent, MasterMessage
from oobleck.job import NodeSpec


class LinkLost(trio.BrokenResourceError):
    """The connection to a node is lost: a network, a machine in between, or the node. Its agent may live.

    An agent that ends or is killed does not cause this, because then the other side closes the connection.
    """


class AgentConnection(Protocol):
    """The master's end of the tunnel to an agent."""

    @property
    def address(self) -> str:
        """Where the node's peers reach it."""

    @property
    def takes_calls(self) -> bool:
        """Whether the master connected to the node's address, so that other agents can probably do the same.

        A node that dials in, or is behind a jump host or a proxy command, may take no calls.
        """

    async def send(self, messages: Sequence[MasterMessage]) -> None:
        """Send messages as one write. Raises trio.BrokenResourceError when the connection is lost."""

    async def receive(self) -> FromAgent:
        """Wait for the next message.

        Raises LinkLost when the connection is lost, trio.EndOfChannel or another trio.BrokenResourceError when the
        agent is, and PeerError for bytes that are no message.
        """

    def rest(self, is_resting: bool) -> None:
        """Note whether the connection is idle for now, because the agent is heard through another one."""

    async def aclose(self) -> None: ...


class Cluster(Protocol):
    """The nodes: how the master reaches them, and what it may do there."""

    async def reach(self, node: NodeSpec, *, attach: bool) -> AgentConnection:
        """Start the node's agent and connect to it. Raises NodeUnreachable.

        Ends an agent of an earlier master before. With `attach`, connects to that agent, and raises AgentGone if it
        does not live.
        """

    async def kill(self, node: NodeSpec) -> bool:
        """Kill the node's processes of this job, as if its power had been cut. Raises NodeUnreachable.

        Returns False if nothing ran there, or still does.
        """

    async def clean(self, node: NodeSpec) -> None:
        """End what is left of this job on the node, and remove its files; best effort, raises nothing."""


class LiveCluster(Cluster, Protocol):
    """Everything that a run asks of real nodes. `Cluster` is the part that the master uses."""

    async def is_alive(self, node: NodeSpec) -> bool:
        """Return whether an agent of this run lives on the node; False if the node cannot be reached."""

    async def signal(self, node: NodeSpec, signal: str, processes: str) -> bool:
        """Send a signal to processes of the node; return False if there are none. Raises NodeUnreachable."""

    async def slow(self, node: NodeSpec, factor: float) -> bool:
        """Slow the node's workers down by `factor`; return False if there are none. Raises NodeUnreachable."""

    async def list_logs(self, node: NodeSpec) -> dict[str, int]:
        """Return the size of each log of the node, by name. Raises NodeUnreachable."""

    async def read_log(self, node: NodeSpec, name: str, offset: int) -> bytes:
        """Return the next part of a log. Raises NodeUnreachable, and UsageError for a file that is no log."""

    def release(self, node: NodeSpec) -> None:
        """Give the node back to its launcher, once it is cleaned."""

    async def forget(self, node: NodeSpec, *, keeps_only_copy: bool = False) -> None:
        """Free the memory in which the node keeps states; best effort, raises nothing.

        With `keeps_only_copy`, states stay that its agent could not write to disk.
        """

    async def aclose(self) -> None:
        """Close all connections."""


class Decisions(Protocol):
    """The coordinator (`control/nodes/coordinator.py`): all decisions of a run, as a pure machine."""

    def start(self, now_s: float) -> list[Command]: ...

    def handle(self, now_s: float, event: Event) -> list[Command]:
        """Take in an event. Raises nothing."""

    def next_deadline(self) -> float:
        """The latest time at which `handle_deadline` must be called; infinity for never."""

    def handle_deadline(self, now_s: float) -> list[Command]:
        """Act on what has not happened in time. Early calls do nothing."""


class Journal(Protocol):
    def append(self, entry: JournalEntry) -> None: ...


class ProfileCache(Protocol):
    def load(self, key: str) -> str | None: ...

    def store(self, key: str, profile_json: str) -> None: ...
