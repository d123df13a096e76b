"""An agent's care for the states that its ranks save: memory that outlives the ranks, and copies on disk.

Ranks send nothing; the agent polls their slots. It writes a state that is planned for the disk, and all states in
memory when ranks end, for whatever reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import trio

from oobleck.errors import CorruptCheckpoint
from oobleck.host.user_path import expand_user
from oobleck.job import CheckpointSpec
from oobleck.job.ranks import RanksSpec
from oobleck.storage import FlashMemory, Slot, memory_files, scripts

from .checkpoint_store import NodeCheckpoints

_POLL_S = 0.02
_POLL_FOR_FILES_S = 0.2
_WAIT_S = 20.0  # how long the ranks' next start may wait for states that only this node has
_ANY = "rank*"

_log = logging.getLogger("oobleck.agent")


class RankStates:
    """The states of one node's ranks. `run` must be running for anything to be written."""

    def __init__(self, store: NodeCheckpoints) -> None:
        self._store = store
        self._memory = Path()
        self._directory = Path()
        self._identity: Mapping[str, str] = {}
        self._is_open = trio.Event()
        self._opened: dict[Path, FlashMemory] = {}
        self._written: set[tuple[str, int]] = set()
        self._requested = 0  # requests to write all states in memory
        self._done = 0
        self._finished = trio.Event()

    def open(self, run: RanksSpec) -> None:
        """Determine the directories of a run. Raises ConfigError."""
        inherited = {**os.environ, **run.environment}
        named = inherited.get(scripts.DIRECTORY_VARIABLE)
        directory = None if not named else str(Path(run.directory, expand_user(Path(named))))
        paths = self._store.open(CheckpointSpec(directory=directory), run="")
        self._memory, self._directory = Path(paths.memory), Path(paths.checkpoints)
        self._identity = scripts.identity_of(run).environment(inherited)
        self._is_open.set()

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables by which ranks find their states."""
        return {
            scripts.MEMORY_VARIABLE: str(self._memory),
            scripts.DIRECTORY_VARIABLE: str(self._directory),
            **self._identity,
        }

    async def run(self) -> None:
        """Write planned and requested states, until cancelled."""
        await self._is_open.wait()
        while True:
            slots = self._slots()
            for slot, note in slots:
                if note.is_planned and not scripts.is_taken(slot):
                    await trio.to_thread.run_sync(self._write_planned, slot, note, abandon_on_cancel=True)
            if self._requested > self._done:
                requested = self._requested
                await trio.to_thread.run_sync(self._write_all, self._slots(), abandon_on_cancel=True)
                self._done = requested
                self._finished.set()
                self._finished = trio.Event()
            await trio.sleep(_POLL_S if slots else _POLL_FOR_FILES_S)

    def num_saved(self) -> int:
        """Return a number that grows with each save."""
        return sum(note.number for _, note in self._slots()) if self._is_open.is_set() else 0

    async def keep(self, *, is_planned: bool) -> None:
        """Have all states in memory written in the background; the ranks have ended, by request if `is_planned`."""
        slots = self._slots()
        if slots:
            self._requested += 1
        if is_planned and any(note.shardings for _, note in slots):
            # Another node may need these shards, and this one may be about to leave.
            with trio.move_on_after(_WAIT_S):
                await self._settled()

    async def settle(self) -> None:
        if self._is_open.is_set() and self._slots():
            self._requested += 1
            await self._settled()

    def leave(self) -> None:
        """Release the memory, unless it holds a state that could not be written."""
        if not self._is_open.is_set():
            return
        if all((note.name, note.rank) in self._written for _, note in self._slots()):
            self._store.discard_memory()
        else:
            self._store.keep_memory()

    async def _settled(self) -> None:
        # A request that arrives during the write may be about newer states, so it counts for the next write.
        requested = self._requested
        while self._done < requested:
            await self._finished.wait()

    def _slots(self) -> list[tuple[Slot, scripts.PartNote]]:
        """Return all valid slots of ranks, the oldest step first."""
        slots: list[tuple[Slot, scripts.PartNote]] = []
        paths = memory_files(self._memory, _ANY)
        for gone in self._opened.keys() - set(paths):
            self._opened.pop(gone).close()
        for path in paths:
            # A rank may be creating the file at this moment, and then the next look finds it.
            with suppress(CorruptCheckpoint, OSError):
                memory = self._opened.setdefault(path, self._opened.get(path) or FlashMemory.open(path))
                noted = [(slot, scripts.note_of(slot)) for slot in memory.valid_slots()]
                slots += [(slot, note) for slot, note in noted if note is not None]
        return sorted(slots, key=lambda each: each[1].age)

    # --- in a thread -------------------------------------------------------------------------------------------------

    def _write_planned(self, slot: Slot, note: scripts.PartNote) -> None:
        try:
            # The copy frees the slot for the rank, which must not wait for the disk.
            data = _copied(slot, note)
        except CorruptCheckpoint as error:
            _log.warning("%s", error)
            scripts.note_taken(slot)
            return
        scripts.note_taken(slot)  # from now on the rank may overwrite the slot
        if self._write(slot, note, data, is_planned=True):
            try:
                scripts.remove_old(self._directory, start=note.start)
            except OSError as error:
                _log.warning("%s: %s", self._directory, error)

    def _write_all(self, slots: list[tuple[Slot, scripts.PartNote]]) -> None:
        for slot, note in slots:
            if (note.name, note.rank) not in self._written:
                with suppress(CorruptCheckpoint):  # the next ranks have overwritten it, so they have loaded it
                    self._write(slot, note, _copied(slot, note), is_planned=False)

    def _write(self, slot: Slot, note: scripts.PartNote, data: memoryview, *, is_planned: bool) -> bool:
        try:
            scripts.write_part(self._directory, note, slot.memory.layout, data, is_planned=is_planned)
            if not is_planned:
                scripts.remove_old(self._directory, start=note.start)
        except OSError as error:
            _log.warning("step %d of rank %d is not on disk: %s", note.step, note.rank, error)
            return False
        self._written.add((note.name, note.rank))
        return True


def _copied(slot: Slot, note: scripts.PartNote) -> memoryview:
    """Copy a slot's bytes. Raises CorruptCheckpoint if the slot was overwritten in the meantime."""
    sequence = slot.sequence
    slot.verify()
    data = memoryview(bytes(slot.data))
    # The rank writes without a lock, so only an unchanged sequence number shows that the copy is of one state.
    if slot.sequence != sequence or scripts.note_of(slot) != note:
        raise CorruptCheckpoint(f"{slot.memory.path}: slot {slot.number} was overwritten while it was read")
    return data
