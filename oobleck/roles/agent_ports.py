"""The agent's ports: all that it may ask of the world. They know neither the journal nor the master's decisions."""

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
    """Where an agent accepts others that are to speak through it."""

    @property
    def door(self) -> protocol.RelayOpen:
        """What callers have to know."""

    async def accept(self) -> trio.abc.Stream:
        """Wait for the next caller, which may be anyone."""

    async def greet(self, caller: trio.abc.Stream) -> trio.abc.Stream:
        """Return a stream to a caller that knows the ticket. Raises trio.BrokenResourceError or trio.TooSlowError."""

    async def aclose(self) -> None: ...


class RelayNetwork(Protocol):
    """How agents reach each other: encrypted, and each side knows that the other belongs to the run."""

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

    async def wait(self) -> protocol.ProcessEnd: ...

    def kill(self) -> None:
        """Send SIGKILL; does nothing if the process is gone."""

    def processor_s(self) -> float:
        """Return the processor time of the process and its children so far; 0 when it is gone."""


class WorkerHost(Protocol):
    """Where an agent starts workers."""

    async def prepare(self, job: JobSpec, cache_dir: Path) -> None:
        """Do ahead what workers would have to do first. Failures are left to them to report."""

    async def start(self, setup: protocol.SetUpWorker) -> WorkerHandle:
        """Start a worker and set it up. Raises WorkersUnavailable if that fails."""

    async def server_ended(self) -> protocol.ForkServerEnded:
        """Wait until the process that forks workers ends; return how it ended, and whether there is another."""


class UseMeter(Protocol):
    """Measures what the node's processes use of its machine."""

    async def measure(self, pids: Sequence[int], gpu_ids: Sequence[str]) -> protocol.NodeUse:
        """Return what these processes with their children, and this one, have used since the last call."""


class RankHandle(Protocol):
    """A rank of a script, from its agent's side."""

    @property
    def pid(self) -> int: ...

    @property
    def is_warm(self) -> bool:
        """Whether it was forked from a process with the imports of earlier ranks."""

    @property
    def can_stay(self) -> bool:
        """Whether it runs an attempt, so that it can take part in the next generation too."""

    async def wait(self) -> protocol.ProcessEnd | None:
        """Wait until the process has ended; None once it waits for its next place instead."""

    def ask_to_end(self) -> None:
        """Send SIGTERM."""

    async def place(self, setup: RankSetup) -> bool:
        """Give it its next place, for which it waits; return whether it lives. Raises ConfigError as `start` does."""

    def interrupt(self, *, after_save: bool) -> None:
        """Have it leave its attempt and wait for its next place: at once, or after its next save."""

    def kill(self) -> None:
        """Send SIGKILL to its process group."""

    def error(self, end: protocol.ProcessEnd) -> protocol.RankError | None:
        """Return why it failed, by its error file, or by its standard error if that fits such an end."""

    def written_bytes(self) -> int:
        """Return how much it has written to its standard output and error."""

    def used_s(self) -> float:
        """Return its processor time so far."""

    def ask_for_stack(self) -> None:
        """Have it write its threads' stacks, if it can."""

    def stack(self) -> str:
        """Return the written stacks; empty if there are none."""

    def groups(self) -> tuple[protocol.GroupRecord, ...]:
        """Return what it has written of its process groups; empty if its flight recorder is off."""

    def new_output(self, *, is_error: bool, is_last: bool) -> str:
        """Return some whole lines of output since `note_shown`; with `is_last`, all that is left."""

    def new_problem(self) -> str | None:
        """Return why output since the last call did not reach its files, if it did not."""

    def note_shown(self, *, is_error: bool) -> None:
        """Note that the last result of `new_output` is shown."""


class RankHost(Protocol):
    """Where an agent starts the ranks of a script."""

    async def run(self) -> None:
        """Keep the process that starts ranks alive until cancelled."""

    async def prepare(self, run: RanksSpec, devices: tuple[int, ...]) -> int:
        """Get ready; return how many ranks the node has. Raises ConfigError if the command cannot run here."""

    def address_of(self, name: str) -> str:
        """Return the address of a network interface of this node; any other name is an address already.

        Raises ConfigError for an interface without one.
        """

    async def open_door(self, run: RanksSpec, address: str) -> protocol.CopyDoor | None:
        """Take in copies of other nodes' states at an address of this node; None if it takes none."""

    def keep_in_memory(self, order: protocol.KeepStates) -> None:
        """Have the ranks overwrite none of these states, and remove copies of older ones."""

    def recall(self) -> protocol.KeepStates | None:
        """Return the newest order to keep states, and report again what the node holds."""

    def copy(self, order: protocol.CopyParts) -> None:
        """Begin to send parts of states to other nodes. Raises trio.WouldBlock for far too many."""

    async def next_report(self) -> protocol.StatesHeld | protocol.PartNotCopied | protocol.PartNotWritten:
        """Wait until the node holds other states, or has failed to copy or write one; return which."""

    def num_saved(self) -> int:
        """Return a number that grows with each state that a rank of this node saves."""

    async def keep_states(self, *, is_planned: bool, is_last: bool) -> None:
        """Have states of ranks that are gone written from memory to disk. Waits for it only where others need it.

        `is_planned`: the ranks were asked to end. `is_last`: all have ended well, and what cannot be written is
        reported before this returns.
        """

    async def settle(self) -> None:
        """Have saved states written to disk, and wait for that."""

    async def leave(self) -> None:
        """Free the memory of states that are on disk."""

    def reserve_port(self) -> int:
        """Return a free port, and keep it for a rank; the one before is released."""

    async def start(self, setup: RankSetup, *, is_spare: bool = False) -> RankHandle:
        """Start a rank; a spare waits for its place once it comes to its attempts.

        Raises WorkersUnavailable if that fails, ConfigError for a bad place for logs.
        """

    def is_warm(self) -> bool:
        """Whether later ranks start warm."""

    async def server_ended(self) -> protocol.ForkServerEnded | protocol.RanksCold:
        """Wait until the process that forks ranks ends, or its imports are lost; return which."""


class CheckpointStore(Protocol):
    """A node's place for saved states: memory that outlives workers, and a directory on disk."""

    def open(self, spec: CheckpointSpec, *, run: str) -> protocol.StoragePaths:
        """Find out where states lie. Raises ConfigError."""

    async def persist(self, device: int, name: str) -> tuple[protocol.Shard, ...]:
        """Write what a worker left in memory. Raises OSError or CorruptCheckpoint."""

    async def persist_all(self, name: str) -> tuple[protocol.Shard, ...]:
        """Write everything that memory has of a state. Raises OSError or CorruptCheckpoint."""

    async def commit(self, manifest: protocol.Manifest, remove: tuple[str, ...]) -> None:
        """Complete a checkpoint, then remove older ones. Raises OSError."""

    async def remove(self, names: tuple[str, ...]) -> None:
        """Remove checkpoints that are too old from disk. Raises OSError."""

    async def remove_unfinished(self, names: tuple[str, ...]) -> None:
        """Remove saves that were given up from disk. Raises OSError."""

    async def discard_memory(self) -> None:
        """Free the memory, unless it has a state that is newer than all on disk."""
