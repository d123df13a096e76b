"""The ports: all that master and agent may ask of the world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import trio

from oobleck.control.events import Command, Event
from oobleck.control.generations import RankSetup
from oobleck.control.journal import JournalEntry
from oobleck.control.protocol import (
    ForkServerEnded,
    FromAgent,
    Manifest,
    MasterMessage,
    ProcessEnd,
    RankError,
    RelayOpen,
    SetUpWorker,
    Shard,
    StoragePaths,
    WorkerBound,
    WorkerMessage,
)
from oobleck.job import CheckpointSpec, JobSpec, NodeSpec
from oobleck.ranks import RanksSpec

__all__ = [
    "AgentConnection",
    "CheckpointStore",
    "Cluster",
    "Decisions",
    "Journal",
    "LinkLost",
    "LiveCluster",
    "MasterConnection",
    "ProfileCache",
    "RankHandle",
    "RankHost",
    "RelayListener",
    "RelayNetwork",
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

    @property
    def takes_calls(self) -> bool:
        """Whether the node was connected to at its address, so that other agents can be expected to do the same.

        One that dials in, or is behind a jump host or a proxy command, may take no calls.
        """
        ...

    async def send(self, messages: Sequence[MasterMessage]) -> None:
        """Send messages as one write. Raises trio.BrokenResourceError when the connection is lost."""
        ...

    async def receive(self) -> FromAgent:
        """Wait for the next message.

        Raises LinkLost when the way to the agent is lost, trio.EndOfChannel or another trio.BrokenResourceError when
        the agent is, PeerError for nonsense.
        """
        ...

    def rest(self, is_resting: bool) -> None:
        """Say whether the connection is idle for now, since the agent is heard through another one."""
        ...

    async def aclose(self) -> None: ...


class MasterConnection(Protocol):
    """The agent's end of the tunnel."""

    async def send(self, messages: Sequence[FromAgent]) -> None: ...

    async def receive(self) -> MasterMessage: ...

    async def aclose(self) -> None: ...


class RelayListener(Protocol):
    """Where an agent takes in others that are to speak through it."""

    @property
    def door(self) -> RelayOpen:
        """What callers must know."""
        ...

    async def accept(self) -> trio.abc.Stream:
        """Wait for the next caller, who may be anybody."""
        ...

    async def greet(self, caller: trio.abc.Stream) -> trio.abc.Stream:
        """Return a stream on which nothing arrives but what comes from one who knows the ticket.

        Raises trio.BrokenResourceError or trio.TooSlowError.
        """
        ...

    async def aclose(self) -> None: ...


class RelayNetwork(Protocol):
    """How agents reach each other. What passes is secret, and each side knows that the other belongs to the run."""

    async def listen(self, address: str) -> RelayListener:
        """Listen at an address, a host name or a network interface of this machine. Raises OSError."""
        ...

    async def dial(self, host: str, port: int, ticket: bytes) -> trio.abc.Stream:
        """Reach a listener. Raises OSError, or a trio error for a stream that is broken."""
        ...


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


class LiveCluster(Cluster, Protocol):
    """All that a run on real nodes asks of them. `Cluster` is the part that the master uses."""

    async def is_alive(self, node: NodeSpec) -> bool:
        """Return whether an agent of this run lives on the node; False where it cannot be reached."""
        ...

    async def signal(self, node: NodeSpec, signal: str, processes: str) -> bool:
        """Send a signal to processes of the node; False where there are none. Raises NodeUnreachable."""
        ...

    async def slow(self, node: NodeSpec, factor: float) -> bool:
        """Have the node's workers take `factor` times as long; False where there are none. Raises NodeUnreachable."""
        ...

    def release(self, node: NodeSpec) -> None:
        """Give the node back to the launcher that gave it, once it is cleaned."""
        ...

    async def forget(self, node: NodeSpec, *, keeps_only_copy: bool = False) -> None:
        """Give back the memory in which the node keeps states; best effort, raises nothing.

        With `keeps_only_copy`, memory that its agent has left because it could not be written stays.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class Decisions(Protocol):
    """All decisions of a run, as a pure machine: the coordinator of a training job, or of a script's ranks."""

    def start(self, now_s: float) -> list[Command]:
        """Begin."""
        ...

    def handle(self, now_s: float, event: Event) -> list[Command]:
        """Take in an event. Raises nothing."""
        ...

    def next_deadline(self) -> float:
        """The latest time at which `handle_deadline` must be called; infinity for never."""
        ...

    def handle_deadline(self, now_s: float) -> list[Command]:
        """Act on what has not happened in time. Early calls do nothing."""
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


class RankHandle(Protocol):
    """A rank of a script, from its agent's side."""

    @property
    def pid(self) -> int: ...

    @property
    def is_warm(self) -> bool:
        """Whether it was forked from a process that had imported what earlier ranks import."""
        ...

    async def wait(self) -> ProcessEnd:
        """Wait until the process is gone."""
        ...

    def ask_to_end(self) -> None:
        """SIGTERM."""
        ...

    def kill(self) -> None:
        """SIGKILL, to all that it has started and that is still of its process group."""
        ...

    def error(self) -> RankError | None:
        """Why it failed, as far as its error file or its standard error says."""
        ...

    def written_bytes(self) -> int:
        """How much it has written to its standard output and error."""
        ...

    def used_s(self) -> float:
        """How much processor time it has used."""
        ...

    def ask_for_stack(self) -> None:
        """Have it write down where its threads are, if it can."""
        ...

    def stack(self) -> str:
        """What it has written down; empty where it cannot."""
        ...

    def new_output(self, *, is_error: bool, is_last: bool) -> str:
        """What it has written since `note_shown`: whole lines, some of them; all that is left with `is_last`."""
        ...

    def note_shown(self, *, is_error: bool) -> None:
        """What `new_output` returned last is shown."""
        ...


class RankHost(Protocol):
    """Where an agent starts the ranks of a script."""

    async def run(self) -> None:
        """Keep what starts ranks, for ever."""
        ...

    async def prepare(self, run: RanksSpec, devices: tuple[int, ...]) -> int:
        """Get ready; returns how many ranks the node has. Raises ConfigError where the command cannot be run here."""
        ...

    def num_saved(self) -> int:
        """How often ranks of this node have saved a state, as far as it is seen: it grows with each save."""
        ...

    async def keep_states(self, *, is_planned: bool) -> None:
        """Have what ranks have saved in memory written to disk; they are gone. Waits for it only where others need it.

        `is_planned` says that they were asked to end.
        """
        ...

    async def settle(self) -> None:
        """Have what ranks have saved in memory written to disk, and wait for it."""
        ...

    def leave(self) -> None:
        """Give back the memory of what is on disk."""
        ...

    def reserve_port(self) -> int:
        """Return a port that is free, and keep it for a rank; the one before is given back."""
        ...

    async def start(self, setup: RankSetup) -> RankHandle:
        """Start a rank. Raises WorkersUnavailable where none can be started, ConfigError for a bad place for logs."""
        ...

    async def server_ended(self) -> ForkServerEnded:
        """Wait until the process that forks ranks ends; returns how it ended, and whether there is another."""
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
