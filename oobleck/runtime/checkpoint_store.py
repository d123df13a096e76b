"""A node's place for states: shared memory that outlives the processes, and the directory of checkpoints.

Files are written by a thread, so that a slow disk holds up nothing else of the agent.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import trio

from oobleck.checkpoint import CheckpointDirectory, Manifest, Shard, find_slots
from oobleck.control.messages import StoragePaths
from oobleck.errors import CorruptCheckpoint
from oobleck.job import CheckpointSpec
from oobleck.user_path import expand_user

from .agent_dir import AgentDir
from .places import private_directory
from .process_id import ProcessId

__all__ = ["NodeCheckpoints", "remove_stale_memory"]

_OWNER = "agent.pid"
"""Which process answers for what lies in a directory in memory; where its other files are depends on TMPDIR."""
_STALE_S = 86_400.0
"""Memory of a run that nobody has gone on with for so long is given back by the next run of another name."""


class NodeCheckpoints:
    """The port `CheckpointStore` of a real node."""

    def __init__(self, directory: AgentDir, *, default_directory: Path) -> None:
        """`default_directory` is where checkpoints lie unless the job says otherwise."""
        self._memory = directory.memory
        self._default_directory = default_directory
        self._checkpoints = CheckpointDirectory(default_directory)

    def open(self, spec: CheckpointSpec, *, run: str) -> StoragePaths:
        """Settle where things lie, and make the directory in memory. Raises ConfigError."""
        path = self._default_directory if spec.directory is None else expand_user(spec.directory).absolute()
        self._checkpoints = CheckpointDirectory(path)
        for level in (self._memory.parent.parent, self._memory.parent, self._memory):
            private_directory(level)
        (self._memory / _OWNER).write_text(f"{ProcessId.of(os.getpid())}\n", encoding="ascii")
        remove_stale_memory(self._memory.parent, now_s=time.time())  # after: what is somebody else's is not removed
        return StoragePaths(memory=str(self._memory), checkpoints=str(path), run=run)

    async def persist(self, device: int, name: str) -> tuple[Shard, ...]:
        """Write what a worker has left in memory; it may be gone itself. Raises OSError or CorruptCheckpoint."""
        return await trio.to_thread.run_sync(self._persist, device, name, abandon_on_cancel=True)

    async def commit(self, manifest: Manifest, remove: tuple[str, ...]) -> None:
        """Complete a checkpoint, then remove older ones. Raises OSError."""
        await trio.to_thread.run_sync(self._commit, manifest, remove, abandon_on_cancel=True)

    def discard_memory(self) -> None:
        """Give the node's shared memory back."""
        shutil.rmtree(self._memory, ignore_errors=True)
        for empty in (self._memory.parent, self._memory.parent.parent):
            try:
                os.rmdir(empty)
            except OSError:
                return  # others use it

    def _persist(self, device: int, name: str) -> tuple[Shard, ...]:
        needle = f'"{name}"'.encode()
        for slot in find_slots(self._memory, f"device{device}"):
            if needle in slot.note:
                return self._checkpoints.persist(name, slot)
        raise CorruptCheckpoint(f"{name} is not in the memory of device {device} any more")

    def _commit(self, manifest: Manifest, remove: tuple[str, ...]) -> None:
        self._checkpoints.commit(manifest)
        self._checkpoints.remove(remove)


def remove_stale_memory(run_memory: Path, *, now_s: float) -> None:
    """Give back what other runs of this user have left in memory: those that ended by a kill, a day ago or longer.

    `run_memory` is where our own run keeps its states; `now_s` is the time of day.
    """
    for path in run_memory.parent.glob("*/"):
        with suppress(OSError):
            newest_s = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
            if path != run_memory and now_s - newest_s > _STALE_S and not _has_living_agents(path):
                shutil.rmtree(path)


def _has_living_agents(run_memory: Path) -> bool:
    owners = map(ProcessId.read, run_memory.glob(f"*/{_OWNER}"))
    return any(owner.lives for owner in owners if owner is not None)
