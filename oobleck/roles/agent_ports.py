"""The agent's ports: all that it may ask of the world.

An agent loads this and the wire's messages: nothing here knows the journal, or what the master decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import trio

from oobleck.control import protocol
from oobleck.control.node_ranks import RankSetup
from oobleck.job import CheckpointSpec, JobSpec
from oobleck.job.ranks import RanksSpec


class MasterConnection(Protocol):
    """The agent's end of the tunnel."""

    async def send(self, messages: Sequence[protocol.FromAgent]) -> None: ...

    async def receive(self) -> protocol.MasterMessage: ...

    async def aclose(self) -> None: ...


class RelayListener(Protocol):
    """Where an agent takes in others that are to speak through it."""

    @property
    def door(self) -> protocol.RelayOpen:
        """What callers must know."""

    async def accept(self) -> trio.abc.Stream:
        """Wait for the next caller, who may be anybody."""

    async def greet(self, caller: trio.abc.Stream) -> trio.abc.Stream:
        """Return a stream on which nothing arrives but what comes from one who knows the ticket.

        Raises trio.BrokenResourceError or trio.TooSlowError.
        """

    async def aclose(self) -> None: ...


class RelayNetwork(Protocol):
    """How agents reach each other. What passes is secret, and each side knows that the other belongs to the run."""

    async def listen(self, address: str) -> RelayListener:
        """Listen at an address, a host name or a network interface of this machine. Raises OSError."""

    async def dial(self, host: str, port: int, ticket: bytes) -> trio.abc.Stream:
        """Reach a listener. Raises OSError, or a trio error for a stream that is broken."""


class WorkerHandle(Protocol):
    """A worker process, from its agent's side."""

    @property
    def pid(self) -> int: ...

    async def send(self, messages: Sequence[protocol.WorkerBound]) -> None: ...

    async def receive(self) -> protocol.WorkerMessage:
        """Wait for the next message. Raises trio.EndOfChannel or trio.BrokenResourceError when it is gone."""

    async def wait(self) -> protocol.ProcessEnd:
        """Wait until the process is gone."""

    def kill(self) -> None:
        """SIGKILL; nothing when it is gone already."""

    def processor_s(self) -> float:
        """Processor time that it has used so far, and the processes that it has started; 0 when it is gone."""


class WorkerHost(Protocol):
    """Where an agent starts workers."""

    async def prepare(self, job: JobSpec, cache_dir: Path) -> None:
        """Do ahead what workers would have to do first; what fails here, they meet and report."""

    async def start(self, setup: protocol.SetUpWorker) -> WorkerHandle:
        """Start a worker and set it up. Raises WorkersUnavailable where none can be started."""

    async def server_ended(self) -> protocol.ForkServerEnded:
        """Wait until the process that forks workers ends; returns how it ended, and whether there is another."""


class RankHandle(Protocol):
    """A rank of a script, from its agent's side."""

    @property
    def pid(self) -> int: ...

    @property
    def is_warm(self) -> bool:
        """Whether it was forked from a process that had imported what earlier ranks import."""

    async def wait(self) -> protocol.ProcessEnd:
        """Wait until the process is gone."""

    def ask_to_end(self) -> None:
        """SIGTERM."""

    def kill(self) -> None:
        """SIGKILL, to all that it has started and that is still of its process group."""

    def error(self, end: protocol.ProcessEnd) -> protocol.RankError | None:
        """Why it failed, as far as its error file says, or its standard error where that speaks of such an end."""

    def written_bytes(self) -> int:
        """How much it has written to its standard output and error."""

    def used_s(self) -> float:
        """How much processor time it has used."""

    def ask_for_stack(self) -> None:
        """Have it write down where its threads are, if it can."""

    def stack(self) -> str:
        """What it has written down; empty where it cannot."""

    def new_output(self, *, is_error: bool, is_last: bool) -> str:
        """What it has written since `note_shown`: whole lines, some of them; all that is left with `is_last`."""

    def new_problem(self) -> str | None:
        """Why what it writes does not reach its files, if it has not since this was asked last."""

    def note_shown(self, *, is_error: bool) -> None:
        """What `new_output` returned last is shown."""


class RankHost(Protocol):
    """Where an agent starts the ranks of a script."""

    async def run(self) -> None:
        """Keep what starts ranks, for ever."""

    async def prepare(self, run: RanksSpec, devices: tuple[int, ...]) -> int:
        """Get ready; returns how many ranks the node has. Raises ConfigError where the command cannot be run here."""

    def num_saved(self) -> int:
        """How often ranks of this node have saved a state, as far as it is seen: it grows with each save."""

    async def keep_states(self, *, is_planned: bool) -> None:
        """Have what ranks have saved in memory written to disk; they are gone. Waits for it only where others need it.

        `is_planned` says that they were asked to end.
        """

    async def settle(self) -> None:
        """Have what ranks have saved in memory written to disk, and wait for it."""

    def leave(self) -> None:
        """Give back the memory of what is on disk."""

    def reserve_port(self) -> int:
        """Return a port that is free, and keep it for a rank; the one before is given back."""

    async def start(self, setup: RankSetup) -> RankHandle:
        """Start a rank. Raises WorkersUnavailable where none can be started, ConfigError for a bad place for logs."""

    async def server_ended(self) -> protocol.ForkServerEnded | protocol.RanksCold:
        """Wait until the process that forks ranks ends, or what it has imported ahead is lost; returns how."""


class CheckpointStore(Protocol):
    """A node's place for saved states: memory that outlives workers, and a directory on disk."""

    def open(self, spec: CheckpointSpec, *, run: str) -> protocol.StoragePaths:
        """Settle where things lie. Raises ConfigError."""

    async def persist(self, device: int, name: str) -> tuple[protocol.Shard, ...]:
        """Write what a worker left in memory to disk. Raises OSError or CorruptCheckpoint."""

    async def persist_all(self, name: str) -> tuple[protocol.Shard, ...]:
        """Write all that memory has of a state. Raises OSError or CorruptCheckpoint."""

    async def commit(self, manifest: protocol.Manifest, remove: tuple[str, ...]) -> None:
        """Complete a checkpoint, then remove older ones. Raises OSError."""

    async def remove(self, names: tuple[str, ...]) -> None:
        """Remove what is on disk of checkpoints that are too old. Raises OSError."""

    async def remove_unfinished(self, names: tuple[str, ...]) -> None:
        """Remove what is on disk of saves that were given up. Raises OSError."""

    def discard_memory(self) -> None:
        """Give the memory back, unless it has a state that is newer than all on disk."""
