"""A node's storage for states: shared memory that outlives the processes, and the directory of checkpoints."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import trio

from oobleck.control.protocol import StoragePaths, run_of
from oobleck.errors import ConfigError, CorruptCheckpoint, PeerError
from oobleck.host.places import place_of
from oobleck.host.writing import write_whole
from oobleck.job import CheckpointSpec
from oobleck.runtime.files import MEMORY_OWNER, ONLY_COPY, AgentDir, ProcessId, private_directory
from oobleck.storage import CheckpointDirectory, Manifest, SavedState, Shard, Slot, find_slots
from oobleck.wire import decode_json

_ANY_DEVICE = "device*"
_STALE_ONLY_COPY_S = 7 * 86_400.0
_STALE_S = 86_400.0


class NodeCheckpoints:
    """The port `CheckpointStore` of a real node."""

    def __init__(self, directory: AgentDir, *, default_directory: Path) -> None:
        """`default_directory` holds checkpoints unless the job names another one."""
        self._memory = directory.memory
        self._default_directory = default_directory
        self._checkpoints = CheckpointDirectory(default_directory)
        # It names the incomplete checkpoints of which this node has written layers.
        self._written: set[str] = set()

    def open(self, spec: CheckpointSpec, *, run: str) -> StoragePaths:
        path = (
            self._default_directory
            if spec.directory is None
            else place_of(spec.directory, "checkpoint.directory").absolute()
        )
        self._checkpoints = CheckpointDirectory(path)
        for level in (self._memory.parent.parent, self._memory.parent, self._memory):
            private_directory(level)
        try:
            write_whole(self._memory / MEMORY_OWNER, f"{ProcessId.of(os.getpid())}\n")
        except OSError as error:
            raise ConfigError(f"shared memory: {self._memory / MEMORY_OWNER}: {error.strerror}") from error
        # Only now is it certain that this memory belongs to this user.
        remove_stale_memory(self._memory.parent, now_s=time.time())
        return StoragePaths(memory=str(self._memory), checkpoints=str(path), run=run)

    async def persist(self, device: int, name: str) -> tuple[Shard, ...]:
        # Here and below, a thread works on the files, because a slow disk must not hold up the agent.
        return await trio.to_thread.run_sync(self._persist, device, name, abandon_on_cancel=True)

    async def persist_all(self, name: str) -> tuple[Shard, ...]:
        return await trio.to_thread.run_sync(self._persist_all, name, abandon_on_cancel=True)

    async def remove(self, names: tuple[str, ...]) -> None:
        await trio.to_thread.run_sync(self._checkpoints.remove, names, abandon_on_cancel=True)

    async def remove_unfinished(self, names: tuple[str, ...]) -> None:
        self._written -= set(names)
        await trio.to_thread.run_sync(self._checkpoints.remove_unfinished, names, abandon_on_cancel=True)

    async def commit(self, manifest: Manifest, remove: tuple[str, ...]) -> None:
        await trio.to_thread.run_sync(self._commit, manifest, remove, abandon_on_cancel=True)

    def keep_memory(self) -> None:
        """Mark the node's shared memory as the only copy of its state."""
        with suppress(OSError):
            (self._memory / ONLY_COPY).touch(mode=0o600)

    async def discard_memory(self) -> None:
        self.keep_memory()  # as long as the disk, or a store that does not answer, has not said what it has
        try:
            is_only_copy = await trio.to_thread.run_sync(self._has_what_the_disk_lacks, abandon_on_cancel=True)
        except OSError:
            return
        if is_only_copy:
            return
        shutil.rmtree(self._memory, ignore_errors=True)
        # `rmdir` fails for a directory that other runs use, and leaves it.
        for empty in (self._memory.parent, self._memory.parent.parent):
            try:
                os.rmdir(empty)
            except OSError:
                return

    def _persist(self, device: int, name: str) -> tuple[Shard, ...]:
        for slot in self._slots_of(name, f"device{device}"):
            shards = self._checkpoints.persist(name, slot)
            self._written.add(name)
            return shards
        raise CorruptCheckpoint(f"{name} is not in the memory of device {device} any more")

    def _persist_all(self, name: str) -> tuple[Shard, ...]:
        slots = self._slots_of(name, _ANY_DEVICE)
        shards = tuple(shard for slot in slots for shard in self._checkpoints.persist(name, slot))
        if shards:
            self._written.add(name)
        return shards

    def _slots_of(self, name: str, stem: str) -> list[Slot]:
        return [slot for slot in find_slots(self._memory, stem) if slot.holds(name)]

    def _has_what_the_disk_lacks(self) -> bool:
        """Whether memory has a state newer than every complete checkpoint of its run that this node sees."""
        on_disk = [found.manifest for found in self._checkpoints.find() if found.manifest is not None]
        for slot in find_slots(self._memory, _ANY_DEVICE):
            with suppress(PeerError):  # another version wrote the note
                state = decode_json(SavedState, slot.note)
                run, age = run_of(state.name), (state.generation, state.step)
                of_run = [(each.generation, each.step) for each in on_disk if each.run == run]
                if age > max(of_run, default=(0, 0)) and not any(run_of(each.origin or "") == run for each in on_disk):
                    return True
        return False

    def _commit(self, manifest: Manifest, remove: tuple[str, ...]) -> None:
        try:
            self._checkpoints.commit(manifest)
        except FileNotFoundError:
            # This directory has nothing of the checkpoint, which is right only if this node wrote nothing of it.
            if manifest.name in self._written:
                raise
        self._written.discard(manifest.name)
        self._checkpoints.remove(remove)


def remove_stale_memory(run_memory: Path, *, now_s: float) -> None:
    """Remove memory that this user's other runs left a day ago or earlier, or a week ago if no disk has its state.

    `run_memory` is our own run's memory, `now_s` the time of day.
    """
    for path in run_memory.parent.glob("*/"):
        with suppress(OSError):
            newest_s = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
            stale_s = _STALE_ONLY_COPY_S if any(path.glob(f"*/{ONLY_COPY}")) else _STALE_S
            owners = map(ProcessId.read, path.glob(f"*/{MEMORY_OWNER}"))
            is_used = any(owner.lives for owner in owners if owner is not None)
            if path != run_memory and now_s - newest_s > stale_s and not is_used:
                shutil.rmtree(path)
