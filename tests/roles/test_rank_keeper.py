"""The agent's care for ranks: all that they have written is shown before their end is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import MockClock

from oobleck.control.node_ranks import RankSetup
from oobleck.control.protocol import (
    AgentMessage,
    AgentStopped,
    ConfigureRanks,
    CopyParts,
    EndRanks,
    Exited,
    ForkServerEnded,
    KeepStates,
    Killed,
    ProcessEnd,
    RankError,
    RankFailed,
    RankOutput,
    RanksFinished,
    RanksReady,
    StartRanks,
    StatesHeld,
)
from oobleck.errors import ConfigError
from oobleck.job.ranks import RanksSpec
from oobleck.roles.rank_keeper import RankKeeper

_LAST_WORDS = "saved\n"
_WELL = Exited(exit_code=0)


@dataclass
class FakeRank:
    """A rank that writes as it ends."""

    pid: int
    is_warm: bool = False
    can_stay: bool = False
    end: ProcessEnd = _WELL
    ended: trio.Event = field(default_factory=trio.Event)
    unshown: str = ""

    def leave(self, end: ProcessEnd) -> None:
        if not self.ended.is_set():
            self.unshown, self.end = _LAST_WORDS, end
            self.ended.set()

    async def wait(self) -> ProcessEnd:
        await self.ended.wait()
        return self.end

    def ask_to_end(self) -> None:
        self.leave(_WELL)

    async def place(self, setup: RankSetup) -> bool:
        raise AssertionError("it cannot stay")

    def interrupt(self, *, after_save: bool) -> None:
        raise AssertionError("it cannot stay")

    def kill(self) -> None:
        self.leave(Killed(signal=9))

    def error(self, end: ProcessEnd) -> RankError | None:
        return None

    def written_bytes(self) -> int:
        return 0

    def used_s(self) -> float:
        return 0.0

    def ask_for_stack(self) -> None: ...

    def stack(self) -> str:
        return ""

    def groups(self) -> tuple[()]:
        return ()

    def new_problem(self) -> str | None:
        return None

    def new_output(self, *, is_error: bool, is_last: bool) -> str:
        return "" if is_error else self.unshown

    def note_shown(self, *, is_error: bool) -> None:
        self.unshown = ""


class FakeHost:
    def __init__(self) -> None:
        self.ranks: list[FakeRank] = []
        self.opened_at: list[str] = []

    async def run(self) -> None:
        await trio.sleep_forever()

    async def prepare(self, run: RanksSpec, devices: tuple[int, ...]) -> int:
        return len(devices)

    def address_of(self, name: str) -> str:
        return {"ib0": "10.1.0.5"}.get(name, name)

    async def open_door(self, run: RanksSpec, address: str) -> None:
        self.opened_at.append(address)

    def keep_in_memory(self, order: KeepStates) -> None: ...

    def copy(self, order: CopyParts) -> None: ...

    async def next_report(self) -> StatesHeld:
        await trio.sleep_forever()
        raise AssertionError

    def num_saved(self) -> int:
        return 0

    async def keep_states(self, *, is_planned: bool, is_last: bool) -> None: ...

    async def settle(self) -> None: ...

    async def leave(self) -> None: ...

    def reserve_port(self) -> int:
        return 1

    def is_warm(self) -> bool:
        return True

    async def start(self, setup: RankSetup, *, is_spare: bool = False) -> FakeRank:
        self.ranks.append(FakeRank(pid=100 + len(self.ranks)))
        return self.ranks[-1]

    async def server_ended(self) -> ForkServerEnded:
        await trio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda host, keeper: keeper.take(EndRanks(generation=1, grace_s=30.0)), [RanksReady]),
        (lambda host, keeper: keeper.take(EndRanks(generation=1, grace_s=0.0)), [RanksReady]),
        (lambda host, keeper: [rank.leave(_WELL) for rank in host.ranks], [RanksFinished]),
        (lambda host, keeper: host.ranks[0].leave(Exited(exit_code=3)), [RankFailed, RanksReady]),
    ],
    ids=["asked", "killed", "finished", "failed"],
)
async def test_the_last_words_of_all_ranks_are_shown_before_their_end_is_said(
    autojump_clock: MockClock, end: Callable[[FakeHost, RankKeeper], object], expected: list[type]
) -> None:
    host, said = FakeHost(), list[AgentMessage]()
    waiting = 3  # the first few times, there is no room

    def show(output: RankOutput) -> bool:
        nonlocal waiting
        waiting -= 1
        if waiting < 0:
            said.append(output)
        return waiting < 0

    keeper = RankKeeper(host, say=said.append, show=show)
    run = RanksSpec(tag="t", entry="script", command=("s.py",), directory="/", hang_timeout_s=0)
    start = StartRanks(
        generation=1,
        group_rank=0,
        num_groups=1,
        first_rank=0,
        num_ranks=3,
        world_size=3,
        master_address="a",
        master_port=1,
        start="s",
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        keeper.take(ConfigureRanks(run=run, devices=(0, 1, 2), generation=0))
        keeper.take(start)
        await trio.sleep(1)
        del said[:]
        end(host, keeper)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    ends = [message for message in said if not isinstance(message, RankOutput)]
    assert [type(message) for message in ends] == expected
    assert [message.rank for message in said[:-1] if isinstance(message, RankOutput)] == [0, 1, 2]
    assert said[-1] is ends[-1]


class _Unprepared(FakeHost):
    has_left = False

    async def prepare(self, run: RanksSpec, devices: tuple[int, ...]) -> int:
        raise ConfigError("--log-dir: it is a file")

    async def leave(self) -> None:
        self.has_left = True


async def test_a_node_that_cannot_start_ranks_gives_its_memory_back_before_it_says_so(
    autojump_clock: MockClock,
) -> None:
    host, said = _Unprepared(), list[tuple[AgentMessage, bool]]()
    keeper = RankKeeper(host, say=lambda message: said.append((message, host.has_left)), show=lambda _: True)
    run = RanksSpec(tag="t", entry="script", command=("s.py",), directory="/", hang_timeout_s=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        keeper.take(ConfigureRanks(run=run, devices=(0,), generation=0))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert said == [(AgentStopped(reason="--log-dir: it is a file", is_failure=True), True)]


@pytest.mark.parametrize("name", ["ib0", "10.1.0.5"])
async def test_other_nodes_are_told_the_address_of_a_network_interface(autojump_clock: MockClock, name: str) -> None:
    host, said = FakeHost(), list[AgentMessage]()
    keeper = RankKeeper(host, say=said.append, show=lambda _: True)
    run = RanksSpec(tag="t", entry="script", command=("s.py",), directory="/", hang_timeout_s=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        keeper.take(ConfigureRanks(run=run, devices=(0,), generation=0, address=name))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert said == [RanksReady(generation=0, num_ranks=1, port=1, address="10.1.0.5")]
    assert host.opened_at == ["10.1.0.5"], "where the node takes in copies"
