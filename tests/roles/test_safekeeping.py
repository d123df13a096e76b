"""What an agent does for saved states before it leaves."""

from __future__ import annotations

import pytest
import trio

from oobleck.control.manifest import Manifest, Shard
from oobleck.control.messages import AgentMessage, LayersPersisted, StateSaved
from oobleck.control.saving_messages import SavedState
from oobleck.job import CheckpointSpec
from oobleck.roles.ports import StoragePaths
from oobleck.roles.safekeeping import Safekeeping


class SlowDisk:
    """A store whose disk takes three seconds for everything."""

    def open(self, spec: CheckpointSpec, *, run: str) -> StoragePaths:
        raise AssertionError("nobody opens it here")

    async def persist(self, device: int, name: str) -> tuple[Shard, ...]:
        await trio.sleep(3)
        return ()

    async def commit(self, manifest: Manifest, remove: tuple[str, ...]) -> None:
        await trio.sleep(3)

    def discard_memory(self) -> None:
        raise AssertionError("nothing is committed yet")


async def test_what_was_handed_over_is_written_before_anybody_leaves(autojump_clock: trio.testing.MockClock) -> None:
    said: list[AgentMessage] = []
    keeping = Safekeeping(SlowDisk(), said.append)
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
        keeping.leave()  # what is not committed stays in memory
        nursery.cancel_scope.cancel()
