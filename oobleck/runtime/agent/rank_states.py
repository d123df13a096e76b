"""What an agent does for the states that its ranks save: memory that outlives them, and the way from there to disk.

Ranks say nothing: the agent looks at their slots. A state that is planned to be on disk is copied, so that its slot can
be used again, then written. What is in memory when ranks end is written as well, however they have ended.
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

_LOOK_S = 0.02
_LOOK_FOR_FILES_S = 0.2
_WAIT_S = 20.0  # how long the next start of ranks may wait for what only this node has
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
        self._wanted = 0  # how often all that is in memory was asked to be written
        self._done = 0
        self._finished = trio.Event()

    def open(self, run: RanksSpec) -> None:
        """Settle where states lie. Raises ConfigError."""
        inherited = {**os.environ, **run.environment}
        named = inherited.get(scripts.DIRECTORY_VARIABLE)
        directory = None if not named else str(Path(run.directory, expand_user(Path(named))))
        paths = self._store.open(CheckpointSpec(directory=directory), run="")
        self._memory, self._directory = Path(paths.memory), Path(paths.checkpoints)
        self._identity = scripts.identity_of(run).environment(inherited)
        self._is_open.set()

    @property
    def environment(self) -> Mapping[str, str]:
        """By which ranks find them."""
        return {
            scripts.MEMORY_VARIABLE: str(self._memory),
            scripts.DIRECTORY_VARIABLE: str(self._directory),
            **self._identity,
        }

    async def run(self) -> None:
        """Write what is to be written, for ever."""
        await self._is_open.wait()
        while True:
            slots = self._slots()
            for slot, note in slots:
                if note.is_planned and not scripts.is_taken(slot):
                    await trio.to_thread.run_sync(self._write_planned, slot, note, abandon_on_cancel=True)
            if self._wanted > self._done:
                wanted = self._wanted
                await trio.to_thread.run_sync(self._write_all, self._slots(), abandon_on_cancel=True)
                self._done = wanted
                self._finished.set()
                self._finished = trio.Event()
            await trio.sleep(_LOOK_S if slots else _LOOK_FOR_FILES_S)

    def num_saved(self) -> int:
        """Return a number that grows with each save that is seen."""
        return sum(note.number for _, note in self._slots()) if self._is_open.is_set() else 0

    async def keep(self, *, is_planned: bool) -> None:
        """Have all that is in memory written, behind what follows; ranks are gone.

        It is waited for where ranks were asked to end and have shards: another node may need them, and this one may be
        about to leave.
        """
        slots = self._slots()
        if slots:
            self._wanted += 1
        if is_planned and any(note.shardings for _, note in slots):
            with trio.move_on_after(_WAIT_S):
                await self._settled()

    async def settle(self) -> None:
        """Have all that is in memory written, and wait for it."""
        if self._is_open.is_set() and self._slots():
            self._wanted += 1
            await self._settled()

    def leave(self) -> None:
        """Give the memory back, unless it has what could not be written."""
        if not self._is_open.is_set():
            return
        if all((note.name, note.rank) in self._written for _, note in self._slots()):
            self._store.discard_memory()
        else:
            self._store.keep_memory()

    async def _settled(self) -> None:
        wanted = self._wanted
        while self._done < wanted:
            await self._finished.wait()

    def _slots(self) -> list[tuple[Slot, scripts.PartNote]]:
        """All valid slots of ranks, the oldest step first."""
        found: list[tuple[Slot, scripts.PartNote]] = []
        paths = memory_files(self._memory, _ANY)
        for gone in self._opened.keys() - set(paths):
            self._opened.pop(gone).close()
        for path in paths:
            with suppress(CorruptCheckpoint, OSError):
                memory = self._opened.setdefault(path, self._opened.get(path) or FlashMemory.open(path))
                noted = [(slot, scripts.note_of(slot)) for slot in memory.valid_slots()]
                found += [(slot, note) for slot, note in noted if note is not None]
        return sorted(found, key=lambda each: each[1].age)

    # --- in a thread -------------------------------------------------------------------------------------------------

    def _write_planned(self, slot: Slot, note: scripts.PartNote) -> None:
        try:
            data = _copied(slot, note)
        except CorruptCheckpoint as error:
            _log.warning("%s", error)
            scripts.note_taken(slot)
            return
        scripts.note_taken(slot)  # from here on, the rank may write over it
        if self._write(slot, note, data, is_planned=True):
            try:
                scripts.remove_old(self._directory, start=note.start)
            except OSError as error:
                _log.warning("%s: %s", self._directory, error)

    def _write_all(self, slots: list[tuple[Slot, scripts.PartNote]]) -> None:
        for slot, note in slots:
            if (note.name, note.rank) not in self._written:
                with suppress(CorruptCheckpoint):  # the next ranks have written over it: they have it
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
    """A copy of a slot's bytes. Raises CorruptCheckpoint where it was written over meanwhile."""
    sequence = slot.sequence
    slot.verify()
    data = memoryview(bytes(slot.data))
    if slot.sequence != sequence or scripts.note_of(slot) != note:
        raise CorruptCheckpoint(f"{slot.memory.path}: slot {slot.number} was written over while it was read")
    return data
