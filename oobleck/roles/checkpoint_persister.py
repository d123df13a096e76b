"""The agent's part that writes saved states: what workers leave in memory goes to disk, in order.

It outlives workers: a state that is complete in memory is written even if its process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import assert_never

import trio

from oobleck.control import protocol
from oobleck.errors import CorruptCheckpoint

from .agent_ports import CheckpointStore

_TASKS_BUFFERED = 100
_SAVES_KEPT = 2  # for how many saves an agent keeps the reports

_Report = protocol.StateSaved | protocol.StateNotSaved | protocol.LayersPersisted
_Task = (
    protocol.StateSaved
    | protocol.PersistState
    | protocol.CommitCheckpoint
    | protocol.RemoveOld
    | protocol.RemoveUnfinished
)


class CheckpointPersister:
    """Writes the states that workers leave in memory; `run` must be running."""

    def __init__(self, store: CheckpointStore, say: Callable[[protocol.AgentMessage], None]) -> None:
        self._store = store
        self._say = say
        self._post, self._tasks = trio.open_memory_channel[_Task](_TASKS_BUFFERED)
        self._num_pending = 0
        self._reports: dict[str, list[_Report]] = {}  # keyed by save, the newest last
        self._settled = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        """Carry out tasks until cancelled."""
        async for task in self._tasks:
            match task:
                case protocol.StateSaved() | protocol.PersistState():
                    await self._persist(task)
                case protocol.CommitCheckpoint():
                    await self._commit(task)
                case protocol.RemoveUnfinished(names=names):
                    with suppress(OSError):  # what stays takes room, but does no other harm
                        await self._store.remove_unfinished(names)
                case protocol.RemoveOld(names=names):
                    with suppress(OSError):
                        await self._store.remove(names)
                case _:
                    assert_never(task)
            self._num_pending -= 1
            self._settled.unpark_all()

    @property
    def reports(self) -> tuple[_Report, ...]:
        """The reports of the last saves, which a new master does not have."""
        return tuple(chain.from_iterable(self._reports.values()))

    def note(self, report: _Report) -> None:
        name = report.state.name if isinstance(report, protocol.StateSaved) else report.name
        self._reports.setdefault(name, []).append(report)
        for old in list(self._reports)[:-_SAVES_KEPT]:
            del self._reports[old]

    async def settle(self) -> None:
        """Wait until all tasks are done: leaving earlier would keep their memory in use."""
        while self._num_pending:
            await self._settled.park()

    def take(self, task: _Task) -> None:
        """Queue a task: a state to write, a checkpoint to commit, or saves to remove."""
        match task:
            case protocol.StateSaved():
                self.note(task)
            case protocol.PersistState(name=name):
                self._reports.setdefault(name, [])
            case protocol.RemoveUnfinished(names=names):
                for name in names:
                    self._reports.pop(name, None)
            case protocol.CommitCheckpoint() | protocol.RemoveOld():
                pass
        try:
            self._post.send_nowait(task)
            self._num_pending += 1
        except trio.WouldBlock:
            self._fail(task, f"the disk is {_TASKS_BUFFERED} saves behind")

    async def leave(self) -> None:
        """Free the memory at the run's end, unless it has a state that the disk lacks."""
        await self._store.discard_memory()

    async def _persist(self, task: protocol.StateSaved | protocol.PersistState) -> None:
        """Write what one device has left, or all that memory has."""
        began_s = trio.current_time()
        device, name = (task.device, task.state.name) if isinstance(task, protocol.StateSaved) else (0, task.name)
        try:
            if isinstance(task, protocol.StateSaved):
                shards = await self._store.persist(device, name)
            else:
                shards = await self._store.persist_all(name)
        except (OSError, CorruptCheckpoint) as error:
            self._fail(task, _said(error))
            return
        duration_s = trio.current_time() - began_s
        self._report(protocol.LayersPersisted(device=device, name=name, shards=shards, duration_s=duration_s))

    async def _commit(self, task: protocol.CommitCheckpoint) -> None:
        try:
            await self._store.commit(task.manifest, task.remove)
        except OSError as error:
            self._fail(task, _said(error))
            return
        self._say(protocol.CheckpointCommitted(name=task.manifest.name))

    def _fail(self, task: _Task, reason: str) -> None:
        device = task.device if isinstance(task, protocol.StateSaved) else 0
        match task:
            case (
                protocol.StateSaved(state=what)
                | protocol.CommitCheckpoint(manifest=what)
                | (protocol.PersistState() as what)
            ):
                self._report(protocol.StateNotSaved(device=device, name=what.name, step=what.step, reason=reason))
            case protocol.RemoveOld() | protocol.RemoveUnfinished():
                pass

    def _report(self, report: protocol.LayersPersisted | protocol.StateNotSaved) -> None:
        if report.name in self._reports:  # else the save was given up meanwhile
            self.note(report)
        self._say(report)


def _said(error: OSError | CorruptCheckpoint) -> str:
    """An error in words for people: the system's, with the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
