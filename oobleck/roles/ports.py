"""The ports: all that master and agent may ask of the world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import trio

from oobleck.control.journal import JournalEntry
from oobleck.control.protocol import (
    AgentMessage,
    ForkServerEnded,
    Manifest,
    MasterMessage,
    ProcessEnd,
    SetUpWorker,
    Shard,
    StoragePaths,
    WorkerBound,
    WorkerMessage,
)
from oobleck.job import CheckpointSpec, JobSpec, NodeSpec

__all__ = [
    "AgentConnection",
    "CheckpointStore",
    "Cluster",
    "Journal",
    "Launcher",
    "LinkLost",
    "MasterConnection",
    "ProfileCache",
    "WorkerHandle",
    "WorkerHost",
]


class LinkLost(trio.BrokenResourceError):
    """The way to a node is lost: a network, a machine in between, or the node. Whether its agent lives is not known.

    An agent that ends, or is killed, is distinguished from this: then the other side closes the connection.
    """


class AgentConnection(Protocol):
    """The master's end of the tunnel to an agent."""

    @property
    def address(self) -> str:
        """Where the node's peers reach it."""
        ...

    async def send(self, messages: Sequence[MasterMessage]) -> None:
        """Send messages as one write. Raises trio.BrokenResourceError when the connection is lost."""
        ...

    async def receive(self) -> AgentMessage:
        """Wait for the next message.

        Raises LinkLost when the way to the agent is lost, trio.EndOfChannel or another trio.BrokenResourceError when
        the agent is, PeerError for nonsense.
        """
        ...

    async def aclose(self) -> None: ...


class MasterConnection(Protocol):
    """The agent's end of the tunnel."""

    async def send(self, messages: Sequence[AgentMessage]) -> None: ...

    async def receive(self) -> MasterMessage: ...

    async def aclose(self) -> None: ...


class Cluster(Protocol):
    """The nodes: how the master reaches them, and what it may do there."""

    async def reach(self, node: NodeSpec, *, attach: bool) -> AgentConnection:
        """Start the node's agent and connect to it. Raises NodeUnreachable.

        An agent that an earlier master left is ended before. With `attach`, it is taken up with, and AgentGone is
        raised where none lives.
        """
        ...

    async def kill(self, node: NodeSpec) -> bool:
        """Kill the node's processes of this job, as if its power had been cut. Raises NodeUnreachable.

        Returns False where nothing was there to be killed, or is still there.
        """
        ...

    async def clean(self, node: NodeSpec) -> None:
        """End what is left of this job on the node, and remove its files there; best effort, raises nothing."""
        ...


class Launcher(Cluster, Protocol):
    """All that a run asks of what reaches its nodes: SSH today. `Cluster` is the part that the master uses."""

    async def is_alive(self, node: NodeSpec) -> bool:
        """Return whether an agent of this run lives on the node; False where it cannot be reached."""
        ...

    async def signal(self, node: NodeSpec, signal: str, processes: str) -> bool:
        """Send a signal to processes of the node; False where there are none. Raises NodeUnreachable."""
        ...

    async def slow(self, node: NodeSpec, factor: float) -> bool:
        """Have the node's workers take `factor` times as long; False where there are none. Raises NodeUnreachable."""
        ...

    async def forget(self, node: NodeSpec) -> None:
        """Give back the memory in which the node keeps states; best effort, raises nothing."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class Journal(Protocol):
    def append(self, entry: JournalEntry) -> None: ...


class ProfileCache(Protocol):
    def load(self, key: str) -> str | None: ...

    def store(self, key: str, profile_json: str) -> None: ...


class WorkerHandle(Protocol):
    """A worker process, from its agent's side."""

    @property
    def pid(self) -> int: ...

    async def send(self, messages: Sequence[WorkerBound]) -> None: ...

    async def receive(self) -> WorkerMessage:
        """Wait for the next message. Raises trio.EndOfChannel or trio.BrokenResourceError when it is gone."""
        ...

    async def wait(self) -> ProcessEnd:
        """Wait until the process is gone."""
        ...

    def kill(self) -> None:
        """SIGKILL; nothing when it is gone already."""
        ...


class WorkerHost(Protocol):
    """Where an agent starts workers."""

    async def prepare(self, job: JobSpec, cache_dir: Path) -> None:
        """Do ahead what workers would have to do first; what fails here, they meet and report."""
        ...

    async def start(self, setup: SetUpWorker) -> WorkerHandle:
        """Start a worker and set it up. Raises WorkersUnavailable where none can be started."""
        ...

    async def server_ended(self) -> ForkServerEnded:
        """Wait until the process that forks workers ends; returns how it ended, and whether there is another."""
        ...


class CheckpointStore(Protocol):
    """A node's place for saved states: memory that outlives workers, and a directory on disk."""

    def open(self, spec: CheckpointSpec, *, run: str) -> StoragePaths:
        """Settle where things lie. Raises ConfigError."""
        ...

    async def persist(self, device: int, name: str) -> tuple[Shard, ...]:
        """Write what a worker left in memory to disk. Raises OSError or CorruptCheckpoint."""
        ...

    async def persist_all(self, name: str) -> tuple[Shard, ...]:
        """Write all that memory has of a state. Raises OSError or CorruptCheckpoint."""
        ...

    async def commit(self, manifest: Manifest, remove: tuple[str, ...]) -> None:
        """Complete a checkpoint, then remove older ones. Raises OSError."""
        ...

    async def remove(self, names: tuple[str, ...]) -> None:
        """Remove what is on disk of checkpoints that are too old. Raises OSError."""
        ...

    async def remove_unfinished(self, names: tuple[str, ...]) -> None:
        """Remove what is on disk of saves that were given up. Raises OSError."""
        ...

    def discard_memory(self) -> None:
        """Give the memory back, unless it has a state that is newer than all on disk."""
        ...
