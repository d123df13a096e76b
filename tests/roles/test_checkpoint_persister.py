"""What an agent does for saved states before it leaves."""

from __future__ import annotations

import pytest
import trio

from oobleck.control.protocol import (
    AgentMessage,
    LayersPersisted,
    Manifest,
    PersistState,
    RemoveOld,
    RemoveUnfinished,
    SavedState,
    Shard,
    StateNotSaved,
    StateSaved,
    StoragePaths,
)
from oobleck.job import CheckpointSpec
from oobleck.roles.checkpoint_persister import CheckpointPersister


class SlowDisk:
    """A store whose disk takes three seconds for everything."""

    def open(self, spec: CheckpointSpec, *, run: str) -> StoragePaths:
        raise AssertionError("nobody opens it here")

    async def persist(self, device: int, name: str) -> tuple[Shard, ...]:
        await trio.sleep(3)
        return ()

    async def commit(self, manifest: Manifest, remove: tuple[str, ...]) -> None:
        await trio.sleep(3)

    async def persist_all(self, name: str) -> tuple[Shard, ...]:
        raise OSError(28, "No space left on device", "/c")

    async def remove(self, names: tuple[str, ...]) -> None:
        raise OSError(5, "Input/output error")

    async def remove_unfinished(self, names: tuple[str, ...]) -> None:
        raise OSError(5, "Input/output error")

    async def discard_memory(self) -> None:
        raise AssertionError("nobody leaves here")


async def test_what_was_handed_over_is_written_before_anybody_leaves(autojump_clock: trio.testing.MockClock) -> None:
    said: list[AgentMessage] = []
    keeping = CheckpointPersister(SlowDisk(), said.append)
    state = SavedState(name="step-1", step=1, generation=1, saved_at="2026-02-01T00:00:00")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeping.run)
        await keeping.settle()
        assert trio.current_time() == 0
        for device in range(2):
            keeping.take(StateSaved(device=device, state=state, layers=(0,), size_bytes=1, pause_s=0.0))
        await keeping.settle()
        assert trio.current_time() == pytest.approx(6)
        assert [type(message) for message in said] == [LayersPersisted] * 2
        nursery.cancel_scope.cancel()


def saved(name: str) -> StateSaved:
    state = SavedState(name=name, step=1, generation=1, saved_at="2026-02-01T00:00:00")
    return StateSaved(device=0, state=state, layers=(0,), size_bytes=1, pause_s=0.0)


async def test_what_was_reported_of_the_last_saves_is_known_until_they_are_given_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    said: list[AgentMessage] = []
    keeping = CheckpointPersister(SlowDisk(), said.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeping.run)
        for name in ("step-1", "step-2", "step-3"):
            keeping.take(saved(name))
        await keeping.settle()
        written = [message for message in said if isinstance(message, LayersPersisted)]
        assert keeping.reports == (saved("step-2"), written[1], saved("step-3"), written[2])
        keeping.take(saved("step-4"))
        keeping.take(RemoveUnfinished(names=("step-4",)))  # while it is being written
        await keeping.settle()
        assert keeping.reports == (saved("step-3"), written[2])
        nursery.cancel_scope.cancel()


async def test_what_a_run_before_has_left_fails_by_its_name(autojump_clock: trio.testing.MockClock) -> None:
    said: list[AgentMessage] = []
    keeping = CheckpointPersister(SlowDisk(), said.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeping.run)
        keeping.take(PersistState(name="step-1", step=1))
        for kind in (RemoveOld, RemoveUnfinished):
            keeping.take(kind(names=("step-0",)))  # what stays on a broken disk is nobody's business here
        await keeping.settle()
        nursery.cancel_scope.cancel()
    assert said == [StateNotSaved(device=0, name="step-1", step=1, reason="/c: No space left on device")]
