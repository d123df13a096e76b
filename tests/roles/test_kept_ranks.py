"""Ranks that keep their processes: who stays, who gets which place, and what ends those that may not stay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from trio.testing import MockClock

from oobleck.control.node_ranks import RankSetup
from oobleck.control.protocol import (
    AgentMessage,
    ConfigureRanks,
    EndRanks,
    Exited,
    Killed,
    ProcessEnd,
    RankFailed,
    RanksReady,
    RanksStarted,
    StartRanks,
)
from oobleck.job.ranks import RanksSpec
from oobleck.roles.rank_keeper import RankKeeper
from tests.roles.test_rank_keeper import FakeHost, FakeRank

KILLED = Killed(signal=9)


@dataclass
class StayingRank(FakeRank):
    """A rank with attempts, which leaves them when asked to, unless it is stuck."""

    can_stay: bool = True
    is_stuck: bool = False
    waits: trio.Event = field(default_factory=trio.Event)
    interrupts: list[bool] = field(default_factory=list)
    places: list[RankSetup] = field(default_factory=list)

    async def wait(self) -> ProcessEnd | None:
        async with trio.open_nursery() as nursery:
            for event in (self.ended, self.waits):
                nursery.start_soon(self._await, event, nursery.cancel_scope)
        return self.end if self.ended.is_set() else None

    @staticmethod
    async def _await(event: trio.Event, scope: trio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    async def place(self, setup: RankSetup) -> bool:
        if self.ended.is_set():
            return False
        self.waits = trio.Event()
        self.places.append(setup)
        return True

    def interrupt(self, *, after_save: bool) -> None:
        self.interrupts.append(after_save)
        if not self.is_stuck:
            self.waits.set()


class StayingHost(FakeHost):
    def __init__(self) -> None:
        super().__init__()
        self.spares: list[StayingRank] = []

    async def start(self, setup: RankSetup, *, is_spare: bool = False) -> StayingRank:
        rank = StayingRank(pid=100 + len(self.ranks) + 10 * len(self.spares))
        if is_spare:
            self.spares.append(rank)
            rank.waits.set()
        else:
            self.ranks.append(rank)
            rank.places.append(setup)
        return rank


def order(generation: int) -> StartRanks:
    return StartRanks(
        generation=generation,
        group_rank=0,
        num_groups=1,
        first_rank=0,
        num_ranks=3,
        world_size=3,
        master_address="a",
        master_port=1,
        start="s",
    )


@asynccontextmanager
async def node(*, spares: int = 0) -> AsyncIterator[tuple[StayingHost, RankKeeper, list[AgentMessage]]]:
    """A node whose three ranks run the first generation."""
    host, said = StayingHost(), list[AgentMessage]()
    keeper = RankKeeper(host, say=said.append, show=lambda _: True)
    run = RanksSpec(tag="t", entry="script", command=("s.py",), directory="/", hang_timeout_s=0, spares=spares)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        keeper.take(ConfigureRanks(run=run, devices=(0, 1, 2), generation=0))
        keeper.take(order(1))
        await trio.sleep(1)
        del said[:]
        yield host, keeper, said
        nursery.cancel_scope.cancel()


def local_ranks(rank: StayingRank) -> list[tuple[int, int]]:
    return [(setup.order.generation, setup.local_rank) for setup in rank.places]


async def test_survivors_keep_their_places_and_the_failed_one_is_forked(autojump_clock: MockClock) -> None:
    async with node() as (host, keeper, said):
        host.ranks[1].leave(KILLED)
        await trio.sleep(1)
        assert [type(message) for message in said] == [RankFailed, RanksReady]
        keeper.take(EndRanks(generation=1, grace_s=0.0, keeps=True))
        keeper.take(order(2))
        await trio.sleep(1)
    assert [local_ranks(rank) for rank in host.ranks] == [[(1, 0), (2, 0)], [(1, 1)], [(1, 2), (2, 2)], [(2, 1)]]
    assert host.ranks[0].interrupts == host.ranks[2].interrupts == [False]
    (started,) = (message for message in said if isinstance(message, RanksStarted))
    assert (started.num_kept, started.is_warm) == (2, False)


async def test_a_spare_takes_the_place_of_a_failed_rank_and_another_one_rehearses(autojump_clock: MockClock) -> None:
    async with node(spares=1) as (host, keeper, _):
        (spare,) = host.spares
        host.ranks[1].leave(KILLED)
        await trio.sleep(1)
        keeper.take(order(2))
        await trio.sleep(1)
        assert local_ranks(spare) == [(2, 1)]
        assert len(host.ranks) == 3
        assert len(host.spares) == 2
        assert spare.pid in keeper.pids


async def test_a_dead_spare_is_passed_over(autojump_clock: MockClock) -> None:
    async with node(spares=1) as (host, keeper, _):
        host.spares[0].leave(KILLED)
        host.ranks[1].leave(KILLED)
        await trio.sleep(1)
        keeper.take(order(2))
        await trio.sleep(1)
        assert local_ranks(host.ranks[3]) == [(2, 1)]


async def test_a_rank_that_does_not_leave_its_attempt_is_killed_and_the_node_is_ready(
    autojump_clock: MockClock,
) -> None:
    async with node() as (host, keeper, said):
        host.ranks[2].is_stuck = True
        host.ranks[1].leave(KILLED)
        await trio.sleep(1)
        assert not any(isinstance(message, RanksReady) for message in said)
        await trio.sleep(10)
        assert host.ranks[2].end == KILLED
        assert isinstance(said[-1], RanksReady)
        assert sum(isinstance(message, RankFailed) for message in said) == 1
        keeper.take(order(2))
        await trio.sleep(1)
        assert [local_ranks(rank)[-1] for rank in host.ranks] == [(2, 0), (1, 1), (1, 2), (2, 1), (2, 2)]


async def test_the_master_decides_that_none_stays_even_after_they_have_left(autojump_clock: MockClock) -> None:
    async with node(spares=1) as (host, keeper, _):
        host.ranks[1].leave(KILLED)
        await trio.sleep(1)
        keeper.take(EndRanks(generation=1, grace_s=0.0, keeps=False))
        keeper.take(order(2))
        await trio.sleep(1)
        assert [rank.end for rank in (host.ranks[0], host.ranks[2], host.spares[0])] == [KILLED] * 3
        assert [local_ranks(rank) for rank in host.ranks[3:]] == [[(2, 0)], [(2, 1)], [(2, 2)]]


async def test_where_nothing_failed_ranks_leave_after_their_next_save_and_in_the_end_at_once(
    autojump_clock: MockClock,
) -> None:
    async with node() as (host, keeper, said):
        host.ranks[2].is_stuck = True
        keeper.take(EndRanks(generation=1, grace_s=5.0, keeps=True))
        await trio.sleep(20)
        assert [rank.interrupts for rank in host.ranks] == [[True], [True], [True, False]]
        assert host.ranks[2].end == KILLED
        assert [type(message) for message in said] == [RanksReady]


async def test_ranks_that_run_no_attempts_any_more_are_killed(autojump_clock: MockClock) -> None:
    async with node() as (host, _, said):
        host.ranks[0].can_stay = False
        host.ranks[1].leave(Exited(exit_code=1))
        await trio.sleep(1)
        assert host.ranks[0].end == KILLED
        assert host.ranks[2].waits.is_set()
        assert isinstance(said[-1], RanksReady)


async def test_all_that_wait_end_with_the_agent(autojump_clock: MockClock) -> None:
    async with node(spares=1) as (host, keeper, _):
        host.ranks[1].leave(KILLED)
        await trio.sleep(1)
        assert len(keeper.pids) == 3
        keeper.kill_all()
        assert keeper.pids == []
        assert [rank.end for rank in (host.ranks[0], host.ranks[2], host.spares[0])] == [KILLED] * 3
