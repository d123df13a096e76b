"""An agent's care for the states that its ranks save: memory that outlives the ranks, copies elsewhere and on disk.

Ranks send nothing; the agent polls their slots. It computes the checksums of the newest states, and writes states to
disk: those that are planned for it, and all in memory when ranks end, for whatever reason.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from oobleck.control import protocol
from oobleck.errors import CorruptCheckpoint
from oobleck.host.user_path import expand_user
from oobleck.job import CheckpointSpec
from oobleck.job.ranks import RanksSpec
from oobleck.storage import MappedFiles, Slot, memory_files, scripts

from .checkpoint_store import NodeCheckpoints
from .copies import MOST_SENDERS, CopyPort, NotCopied, Pace, send_part

_POLL_S = 0.02
_POLL_FOR_FILES_S = 0.2
_WAIT_S = 20.0  # how long the ranks' next start may wait for states that only this node has
_TELL_S = 1.0
_ANY = "rank*"
_REPORT_S = 0.02
_REPORTS_PER_S = 2000  # of all nodes together, to one master
_MOST_REPORTS = 10_000

_Report = protocol.StatesHeld | protocol.PartNotCopied | protocol.PartNotWritten

_log = logging.getLogger("oobleck.agent")


class RankStates:
    """The states of one node's ranks. `run` must be running for anything to be written."""

    def __init__(self, store: NodeCheckpoints) -> None:
        self._store = store
        self._files = MappedFiles(Path())
        self._directory = Path()
        self._identity: Mapping[str, str] = {}
        self._is_open = trio.Event()
        self._written: set[tuple[str, int, int]] = set()
        self._unwritten: list[protocol.PartNotWritten] = []  # and not reported yet
        self._requested = 0  # requests to write all states in memory
        self._done = 0
        self._finished = trio.Event()
        self._notes: dict[tuple[Path, int], tuple[int, scripts.PartNote | None]] = {}
        self._kept = scripts.Kept()
        self._kept_number = 0
        self._heeded = 0
        self._order: protocol.KeepStates | None = None
        self._reported: protocol.StatesHeld | None = protocol.StatesHeld(parts=())
        self._leaves = False
        self._unique = ""  # the end of the name of the newest start
        self._num_nodes = 1
        self._port: CopyPort | None = None
        self._has_port = trio.Event()
        self._pace = Pace(math.inf)
        self._has_parity = False
        self._parity_notes: dict[tuple[Path, int], tuple[int, scripts.ParityNote | None]] = {}
        self._senders = trio.CapacityLimiter(MOST_SENDERS)
        self._reports, self._next_reports = trio.open_memory_channel[_Report](_MOST_REPORTS)
        self._num_reports = self._num_received = self._num_told = 0
        self._asked = trio.Event()  # for the next report, and so the last one was told
        self._orders, self._next_orders = trio.open_memory_channel[protocol.CopyParts](_MOST_REPORTS)

    async def open_door(self, run: RanksSpec, node: str, address: str) -> protocol.CopyDoor | None:
        """Listen for copies of other nodes' parts, if the run makes any."""
        if not run.copies or not address:
            return None
        port = CopyPort(self._files, lambda: frozenset(self._kept.names))
        try:
            door = await port.listen(node, address)
        except OSError as error:
            _log.warning("no copies are taken in: cannot listen at %s: %s", address, error.strerror)
            return None
        self._pace = Pace(run.copy_rate)
        self._has_parity = run.parity_nodes > 0
        self._port = port
        self._has_port.set()
        return door

    def begin(self, unique: str, *, num_nodes: int) -> None:
        """Note the start of a generation."""
        self._unique, self._num_nodes = unique, num_nodes

    def open(self, run: RanksSpec) -> None:
        """Determine the directories of a run. Raises ConfigError."""
        inherited = {**os.environ, **run.environment}
        named = inherited.get(scripts.DIRECTORY_VARIABLE)
        directory = None if not named else str(Path(run.directory, expand_user(Path(named))))
        paths = self._store.open(CheckpointSpec(directory=directory), run="")
        self._files, self._directory = MappedFiles(Path(paths.memory)), Path(paths.checkpoints)
        self._identity = scripts.identity_of(run).environment(inherited)
        self._is_open.set()

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables by which ranks find their states."""
        return {
            scripts.MEMORY_VARIABLE: str(self._files.directory),
            scripts.DIRECTORY_VARIABLE: str(self._directory),
            **self._identity,
        }

    async def run(self) -> None:
        """Sum states, and write planned and requested ones, until cancelled."""
        await self._is_open.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sum_newest)
            nursery.start_soon(self._report)
            nursery.start_soon(self._make_copies)
            await self._write_states()

    # --- copies on other nodes ---------------------------------------------------------------------------------------

    async def next_report(self) -> _Report:
        """Wait until the node holds other parts, or could not copy or write one. Who asks again has told the last."""
        self._num_told = self._num_received
        self._asked.set()
        self._asked = trio.Event()
        report = await self._next_reports.receive()
        self._num_received += 1
        return report

    def keep_in_memory(self, order: protocol.KeepStates) -> None:
        """Keep states, and remove the copies of others that no rank would load any more."""
        names = tuple(scripts.state_name(state.step, state.start) for state in order.states)
        self._kept = scripts.Kept(names=names, from_step=order.from_step, start=order.start)
        try:
            scripts.note_kept(self._files.directory, self._kept)
            self._kept_number, self._order = order.number, order
        except OSError as error:
            _log.warning("ranks may overwrite states that are to be copied: %s", error)
        starts = {state.start for state in order.states}
        for path in (file for each in (_ANY, scripts.ANY_PARITY) for file in memory_files(self._files.directory, each)):
            start = scripts.copy_start(path)
            if start is not None and start not in starts and not start.endswith(self._unique):
                scripts.remove_copies(path)

    def recall(self) -> protocol.KeepStates | None:
        """Return the newest order to keep states, and report all held parts again."""
        self._reported = None
        return self._order

    def copy(self, order: protocol.CopyParts) -> None:
        """Send parts to other nodes, in the background. Raises trio.WouldBlock for far too many."""
        self._orders.send_nowait(order)

    async def _report(self) -> None:
        kept = 0
        while True:
            # A rank may have chosen its slot before the newest order, so that counts from the next look on.
            before, kept = kept, self._kept_number
            await self._report_held(before)
            await trio.sleep(max(_REPORT_S, self._num_nodes / _REPORTS_PER_S))

    async def _report_held(self, kept: int) -> None:
        self._heeded = kept
        parts = sorted(self._held_parts(), key=lambda part: (part.state, part.rank))
        parities = tuple(self._held_parities()) if self._has_parity else ()
        held = protocol.StatesHeld(parts=tuple(parts), parities=parities, kept=kept)
        if held != self._reported:
            self._reported = held
            await self._send_report(held)

    async def _send_report(self, report: _Report) -> None:
        self._num_reports += 1
        await self._reports.send(report)

    def _held_parts(self) -> set[protocol.HeldPart]:
        return {
            protocol.HeldPart(
                state=_state_of(note),
                rank=note.rank,
                world_size=note.world_size,
                is_sharded=bool(note.shardings),
                can_stay=not note.shardings or self._is_copy(slot) or len(slot.memory.slots()) >= scripts.SLOTS_TO_COPY,
                progress=protocol.ScriptProgress(from_step=note.from_step, worked_s=note.worked_s, loss=note.loss),
                num_bytes=slot.memory.layout.size_bytes,
            )
            for slot, note in self._all_slots()
        }

    def _held_parities(self) -> list[protocol.HeldParity]:
        slots = [slot for memory in self._files.all(scripts.ANY_PARITY) for slot in memory.valid_slots()]
        for slot in slots:
            key = slot.memory.path, slot.number
            if self._parity_notes.get(key, (0, None))[0] != slot.sequence:
                self._parity_notes[key] = slot.sequence, scripts.parity_note_of(slot)
        notes = [self._parity_notes[slot.memory.path, slot.number][1] for slot in slots]
        return [
            protocol.HeldParity(
                state=protocol.ScriptState(number=scripts.start_number(note.start), step=note.step, start=note.start),
                ranks=note.ranks,
                world_size=note.world_size,
            )
            for note in notes
            if note is not None
        ]

    async def _make_copies(self) -> None:
        await self._has_port.wait()
        assert self._port is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._port.run)
            async for order in self._next_orders:
                for part in order.parts:
                    for door in part.doors:
                        nursery.start_soon(self._send_copy, order.state, part, door)

    async def _send_copy(self, state: protocol.ScriptState, part: protocol.PartCopies, door: protocol.CopyDoor) -> None:
        rank = part.rank
        saves = (slot for slot, note in reversed(self._all_slots()) if (_state_of(note), note.rank) == (state, rank))
        slot = next(saves, None)
        try:
            if slot is None:
                raise NotCopied("it was overwritten", is_gone=True)
            # While a lost part is made again, nothing else needs the link: the ranks wait for it.
            pace = self._pace if part.mix is None or part.mix.missing is None else Pace(math.inf)
            await trio.to_thread.run_sync(
                send_part, slot, door, pace, part.mix, abandon_on_cancel=True, limiter=self._senders
            )
        except NotCopied as error:
            failed = protocol.PartNotCopied(
                state=state, rank=rank, target=door.node, reason=str(error), is_gone=error.is_gone
            )
            await self._send_report(failed)

    # --- states on disk ----------------------------------------------------------------------------------------------

    async def _sum_newest(self) -> None:
        while True:
            newest = {slot.memory.path: slot for slot, _ in self._slots()}
            async with trio.open_nursery() as nursery:
                # One core for each rank, as ranks have it, and no rank waits for another's.
                for slot in newest.values():
                    if slot.sums is None:
                        nursery.start_soon(partial(trio.to_thread.run_sync, slot.sum, abandon_on_cancel=True))
            await trio.sleep(_POLL_S if newest else _POLL_FOR_FILES_S)

    async def _write_states(self) -> None:
        while True:
            slots = self._slots()
            for slot, note in slots:
                if note.is_planned and not scripts.is_taken(slot):
                    await trio.to_thread.run_sync(self._write_planned, slot, note, abandon_on_cancel=True)
                    await self._report_unwritten()
            if self._requested > self._done:
                requested = self._requested
                await trio.to_thread.run_sync(self._write_all, self._slots_to_write(), abandon_on_cancel=True)
                await self._report_unwritten()
                self._done = requested
                self._finished.set()
                self._finished = trio.Event()
            await trio.sleep(_POLL_S if slots else _POLL_FOR_FILES_S)

    async def _report_unwritten(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        for part in unwritten:
            await self._send_report(part)

    def bad_losses(self, local_rank: int) -> protocol.BadLosses | None:
        """Return the bad losses over which a rank of the newest start has ended; None if it has named none."""
        bad = scripts.bad_in(self._files.directory, local_rank)
        return bad if bad is not None and bad.start.endswith(self._unique) else None

    def num_saved(self) -> int:
        """Return a number that grows with each save."""
        return sum(note.number for _, note in self._slots()) if self._is_open.is_set() else 0

    async def keep(self, *, is_planned: bool, is_last: bool) -> None:
        """Have all states in memory written in the background; the ranks have ended.

        They have by request if `is_planned`, and well if `is_last`.
        """
        slots = self._slots()
        if slots:
            self._requested += 1
            # The master learns of the last saves before it learns of the ranks' end, over which the run may be.
            await self._report_held(self._heeded)
            await self._told()
        if is_last or (is_planned and any(note.shardings for _, note in slots)):
            # The master says what could not be written; or another node needs these shards, and this one may leave.
            with trio.move_on_after(_WAIT_S):
                await self._settled()
            await self._told()

    async def _told(self) -> None:
        """Wait until the master has been sent all reports."""
        with trio.move_on_after(_TELL_S):
            while self._num_told < self._num_reports:
                await self._asked.wait()

    async def settle(self) -> None:
        self._leaves = True
        if self._port is not None:
            self._port.close()  # a copy that came after the write would keep the memory
        if self._is_open.is_set() and self._all_slots():
            self._requested += 1
            await self._settled()

    async def leave(self) -> None:
        """Release the memory, unless it holds a state that could not be written."""
        if not self._is_open.is_set():
            return
        if all(_key_of(note) in self._written for _, note in self._slots_to_write()):
            await self._store.discard_memory()
        else:
            self._store.keep_memory()

    async def _settled(self) -> None:
        # A request that arrives during the write may be about newer states, so it counts for the next write.
        requested = self._requested
        while self._done < requested:
            await self._finished.wait()

    def _slots_to_write(self) -> list[tuple[Slot, scripts.PartNote]]:
        # While other nodes live, they write what this one has copies of.
        return self._all_slots() if self._leaves else self._slots()

    def _slots(self) -> list[tuple[Slot, scripts.PartNote]]:
        """Return all valid slots of this node's ranks, the oldest save first."""
        return [each for each in self._all_slots() if not self._is_copy(each[0])]

    @staticmethod
    def _is_copy(slot: Slot) -> bool:
        return scripts.copy_start(slot.memory.path) is not None

    def _all_slots(self) -> list[tuple[Slot, scripts.PartNote]]:
        """Return all valid slots, those with copies of other nodes' parts included, the oldest save first."""
        slots: list[tuple[Slot, scripts.PartNote]] = []
        for memory in self._files.all(_ANY):
            noted = [(slot, self._note_of(slot)) for slot in memory.valid_slots()]
            slots += [(slot, note) for slot, note in noted if note is not None]
        return sorted(slots, key=lambda each: (each[1].age, each[1].number))  # a step may be saved twice

    def _note_of(self, slot: Slot) -> scripts.PartNote | None:
        key, sequence = (slot.memory.path, slot.number), slot.sequence
        if self._notes.get(key, (0, None))[0] != sequence:
            self._notes[key] = sequence, scripts.note_of(slot)
        return self._notes[key][1]

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
            if _key_of(note) not in self._written:
                with suppress(CorruptCheckpoint):  # the next ranks have overwritten it, so they have loaded it
                    self._write(slot, note, _copied(slot, note), is_planned=False)

    def _write(self, slot: Slot, note: scripts.PartNote, data: memoryview, *, is_planned: bool) -> bool:
        try:
            scripts.write_part(self._directory, note, slot.memory.layout, data, is_planned=is_planned)
            if not is_planned:
                scripts.remove_old(self._directory, start=note.start)
        except OSError as error:
            reason = f"{self._directory}: {error.strerror or error}"
            _log.warning("step %d of rank %d is not on disk: %s", note.step, note.rank, reason)
            is_sharded = bool(note.shardings)
            self._unwritten.append(
                protocol.PartNotWritten(state=_state_of(note), rank=note.rank, is_sharded=is_sharded, reason=reason)
            )
            return False
        self._written.add(_key_of(note))
        return True


def _key_of(note: scripts.PartNote) -> tuple[str, int, int]:
    return note.name, note.rank, note.number  # a step may be saved twice


def _state_of(note: scripts.PartNote) -> protocol.ScriptState:
    return protocol.ScriptState(number=note.age.number, step=note.step, start=note.start)


def _copied(slot: Slot, note: scripts.PartNote) -> memoryview:
    """Copy a slot's bytes. Raises CorruptCheckpoint if the slot was overwritten in the meantime."""
    sequence = slot.sequence
    slot.verify()
    data = memoryview(bytes(slot.data))
    # The rank writes without a lock, so only an unchanged sequence number shows that the copy is of one state.
    if slot.sequence != sequence or scripts.note_of(slot) != note:
        raise CorruptCheckpoint(f"{slot.memory.path}: slot {slot.number} was overwritten while it was read")
    return data
