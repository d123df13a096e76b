"""The agent's part that runs a script's ranks: starts them, kills the others when one fails, and shows their output.

It runs one generation at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import trio

from oobleck.control import protocol
from oobleck.control.node_ranks import NodeSigns, RankSetup, is_shown, shown_text
from oobleck.errors import ConfigError, WorkersUnavailable

from .agent_ports import RankHandle, RankHost

_ORDERS_BUFFERED = 100
_LOOK_S = 0.05
_STACK_S = 1.0  # how long a rank may take to write its stack
_LOOKS_EACH_TIMEOUT = 20
_LONGEST_LOOK_S = 5.0
"""It looks for signs of life this often in the time for which they may be missing, and at least every few seconds."""
_LAST_WORDS_S = 2.0  # how long the end of a rank's output waits for a master that shows none of it
_LEAVES_S = 10.0
"""How long a rank may take to leave its attempt: until its next collective, unless it hangs in one."""


@dataclass(slots=True)
class _Rank:
    setup: RankSetup
    handle: RankHandle
    end: protocol.ProcessEnd | None = None
    has_left: bool = False
    """Whether it lives, and waits for its place in another generation."""


@dataclass(slots=True)
class _Generation:
    number: int
    ranks: list[_Rank] = field(default_factory=list)
    is_ending: bool = False
    """Whether its ranks are being ended, so that failures do not count."""
    is_asked: bool = False
    """Whether they were asked to end, because nothing has failed."""
    keeps: bool = True
    """Whether those that can may stay for the next generation."""
    is_unwritten: bool = False
    """Whether it was reported that one of their files cannot be written."""
    gone: trio.Event = field(default_factory=trio.Event)

    @property
    def living(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.end is None and not rank.has_left]


class RankKeeper:
    """Runs the ranks of one node; `run` must be running."""

    def __init__(
        self,
        host: RankHost,
        *,
        say: Callable[[protocol.AgentMessage], None],
        show: Callable[[protocol.RankOutput], bool],
    ) -> None:
        """`show` returns False if it cannot take output now; it is offered again later."""
        self._host = host
        self._say = say
        self._show = show
        self._num_shown = 0
        self._post, self._orders = trio.open_memory_channel[protocol.RanksOrder](_ORDERS_BUFFERED)
        self._configured: protocol.ConfigureRanks | None = None
        self._num_ranks = 1
        self._address = ""
        self._door: protocol.CopyDoor | None = None
        self._cleared = 0  # no rank of generations up to this one runs, or will
        self._current: _Generation | None = None
        self._started: protocol.RanksStarted | None = None
        self._kept: dict[int, RankHandle] = {}
        """Ranks that wait for the next generation, keyed by local rank."""
        self._spares: list[RankHandle] = []
        self._num_rehearsing = 0
        self._signs: NodeSigns | None = None

    def take(self, order: protocol.RanksOrder) -> None:
        """Queue an order. Raises trio.WouldBlock for far too many."""
        self._post.send_nowait(order)

    async def run(self) -> None:
        """Carry out orders until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._host.run)
            nursery.start_soon(self._watch_server)
            nursery.start_soon(self._watch_states)
            async for order in self._orders:
                match order:
                    case protocol.ConfigureRanks():
                        await self._configure(order)
                    case protocol.StartRanks():
                        await self._start(order, nursery)
                    case protocol.EndRanks():
                        if not order.keeps:  # before the next order, which may be to start others
                            self._keep_none()
                        nursery.start_soon(self._end, order)
                    case protocol.TraceRanks(generation=generation):
                        nursery.start_soon(self._trace, generation)
                    case protocol.KeepStates():
                        self._host.keep_in_memory(order)
                    case protocol.CopyParts():
                        self._host.copy(order)
                    case _:
                        assert_never(order)

    @property
    def pids(self) -> list[int]:
        """The processes of the living ranks."""
        living = [] if self._current is None else self._current.living
        return [handle.pid for handle in (*(rank.handle for rank in living), *self._kept.values(), *self._spares)]

    def kill_all(self) -> None:
        """Kill all ranks; their ends are not reported any more."""
        self._keep_none()
        if self._current is not None:
            self._current.is_ending, self._current.keeps = True, False
            _kill(self._current.living)

    async def all_gone(self) -> None:
        if self._current is not None:
            await self._current.gone.wait()

    async def settle(self) -> None:
        await self._host.settle()

    async def leave(self) -> None:
        await self._host.leave()

    async def _watch_server(self) -> None:
        while True:
            self._say(await self._host.server_ended())

    async def _watch_states(self) -> None:
        while True:
            self._say(await self._host.next_report())

    async def _configure(self, order: protocol.ConfigureRanks) -> None:
        """Prepare at first; later, repeat reports for a master that may have missed them."""
        if self._configured is None:
            try:
                self._num_ranks = await self._host.prepare(order.run, order.devices)
                self._address = self._host.address_of(order.address)
                self._door = await self._host.open_door(order.run, self._address)
            except ConfigError as error:
                await self._host.leave()
                self._say(protocol.AgentStopped(reason=str(error), is_failure=True))
                return
            self._configured, self._cleared = order, order.generation
        else:
            self._say(protocol.StatesKept(door=self._door, order=self._host.recall()))
            if self._signs is not None:
                self._signs.repeat()
        if self._current is None:
            self._say_ready()
            return
        if self._started is not None:
            self._say(self._started)
        if self._current.gone.is_set():
            self._say(protocol.RanksFinished(generation=self._current.number))

    def _say_ready(self) -> None:
        port = self._host.reserve_port()
        self._say(
            protocol.RanksReady(
                generation=self._cleared,
                num_ranks=self._num_ranks,
                port=port,
                address=self._address,
                door=self._door,
            )
        )

    async def _start(self, order: protocol.StartRanks, nursery: trio.Nursery) -> None:
        configured = self._configured
        if configured is None or self._current is not None or order.generation <= self._cleared:
            return  # the generation was ended before it began, or the order is repeated
        self._current = generation = _Generation(order.generation)
        self._started = None
        setups = [
            RankSetup(run=configured.run, order=order, local_rank=local_rank, devices=configured.devices)
            for local_rank in range(order.num_ranks)
        ]
        num_cold = num_kept = 0
        try:
            for setup in setups:
                handle = await self._placed(setup)
                num_kept += handle is not None
                if handle is None:
                    handle = await self._host.start(setup)
                    num_cold += not handle.is_warm
                generation.ranks.append(_Rank(setup, handle))
        except (WorkersUnavailable, ConfigError) as error:
            self._say(protocol.AgentStopped(reason=str(error), is_failure=True))
            self.kill_all()  # the ranks that did start are watched below, until they are gone
        for rank in generation.ranks:
            nursery.start_soon(self._watch, generation, rank, nursery)
        nursery.start_soon(self._rehearse, generation, setups[-1])
        nursery.start_soon(self._show_output, generation)
        if configured.run.hang_timeout_s:
            nursery.start_soon(self._watch_signs, generation, configured.run.hang_timeout_s)
        pids = tuple(rank.handle.pid for rank in generation.ranks)
        self._started = protocol.RanksStarted(
            generation=order.generation, pids=pids, is_warm=not num_cold, num_kept=num_kept
        )
        self._say(self._started)

    async def _watch(self, generation: _Generation, rank: _Rank, nursery: trio.Nursery) -> None:
        """Wait for a rank's end. If it failed, end the others at once, which could only wait for it."""
        end = await rank.handle.wait()
        if end is None:
            await self._keep(generation, rank)
            return
        has_failed = end != protocol.Exited(exit_code=0) and not generation.is_ending
        if has_failed:
            generation.is_ending = True
            # The master decides whether they may stay; this report reaches it before anything begins.
            self._clear(generation, [other for other in generation.living if other is not rank])
            nursery.start_soon(self._give_up, generation)
            self._take_output(generation, is_last=False)  # the run may end over this failure
            setup = rank.setup
            self._say(
                protocol.RankFailed(
                    generation=generation.number,
                    rank=setup.rank,
                    local_rank=setup.local_rank,
                    pid=rank.handle.pid,
                    end=end,
                    error=rank.handle.error(end),
                )
            )
        rank.end = end
        if not generation.living:
            await self._finish(generation)

    def _clear(self, generation: _Generation, ranks: Sequence[_Rank]) -> None:
        """Have ranks leave their attempts at once, and kill those that cannot."""
        for rank in ranks:
            if generation.keeps and rank.handle.can_stay:
                rank.handle.interrupt(after_save=False)
            else:
                rank.handle.kill()

    async def _give_up(self, generation: _Generation) -> None:
        """Kill ranks that do not leave their attempts."""
        with trio.move_on_after(_LEAVES_S):
            await generation.gone.wait()
        _kill(generation.living)

    # --- ranks that stay ---------------------------------------------------------------------------------------------

    async def _keep(self, generation: _Generation, rank: _Rank) -> None:
        """Note that a rank has left its attempt, and waits."""
        rank.has_left = True
        if generation.keeps:
            self._kept[rank.setup.local_rank] = rank.handle
        else:
            rank.handle.kill()
        if not generation.living:
            await self._finish(generation)

    def _keep_none(self) -> None:
        for handle in (*self._kept.values(), *self._spares):
            handle.kill()
        self._kept.clear()
        self._spares.clear()

    async def _placed(self, setup: RankSetup) -> RankHandle | None:
        """Give a place to the rank that had it, or to a spare; None if there is neither."""
        kept = self._kept.pop(setup.local_rank, None)
        for handle in (*([] if kept is None else [kept]), *self._spares):
            if handle in self._spares:
                self._spares.remove(handle)
            if await handle.place(setup):
                return handle
        return None

    async def _rehearse(self, generation: _Generation, setup: RankSetup) -> None:
        """Have spares run up to their attempts, once the generation's ranks have come to theirs."""
        while not (
            all(rank.handle.can_stay for rank in generation.ranks) and (self._host.is_warm() or not setup.run.is_warmed)
        ):
            if generation.is_ending or generation.gone.is_set():
                return
            await trio.sleep(_LOOK_S)
        while len(self._spares) + self._num_rehearsing < setup.run.spares and not generation.is_ending:
            self._num_rehearsing += 1
            try:
                handle = await self._host.start(setup, is_spare=True)
                if await handle.wait() is not None:
                    return  # the ranks themselves show why
                self._spares.append(handle)
            except (WorkersUnavailable, ConfigError):
                return  # those that need a place start again
            finally:
                self._num_rehearsing -= 1

    async def _finish(self, generation: _Generation) -> None:
        # The next generation needs these states, so they are kept before the node reports that it is ready for it.
        await self._host.keep_states(is_planned=generation.is_asked, is_last=not generation.is_ending)
        await self._show_rest(generation)  # before their end is reported, because the run may end over it
        if generation.is_ending:
            self._cleared = max(self._cleared, generation.number)
            self._current = None
            self._say_ready()
        else:
            self._say(protocol.RanksFinished(generation=generation.number))
        generation.gone.set()

    async def _end(self, order: protocol.EndRanks) -> None:
        """End a generation: ask its ranks, and kill those that take too long."""
        number, grace_s, generation = order.generation, order.grace_s, self._current
        # An order to start it may still be under way, and is dropped when it comes.
        if generation is None or generation.number > number:
            self._cleared = max(self._cleared, number)
            if generation is None:
                self._say_ready()
            return
        generation.is_ending = True
        generation.keeps = order.keeps
        if generation.gone.is_set():  # all had ended well, and start again
            self._cleared, self._current = number, None
            self._say_ready()
            return
        if grace_s:
            generation.is_asked = True
            for rank in generation.living:
                if order.keeps and rank.handle.can_stay:
                    rank.handle.interrupt(after_save=True)
                else:
                    rank.handle.ask_to_end()
            with trio.move_on_after(grace_s):
                await generation.gone.wait()
        self._clear(generation, generation.living)
        await self._give_up(generation)

    # --- hangs -------------------------------------------------------------------------------------------------------

    async def _watch_signs(self, generation: _Generation, timeout_s: float) -> None:
        """Report when ranks have shown no sign of life for too long, and when they show one again."""
        self._signs = signs = NodeSigns(timeout_s=timeout_s, generation=generation.number)
        while not generation.gone.is_set():
            living = generation.living
            count = self._host.num_saved() + sum(rank.handle.written_bytes() for rank in generation.ranks)
            used_s = {rank.setup.rank: rank.handle.used_s() for rank in living}
            report = signs.look(trio.current_time(), count=count, used_s=used_s)
            if report is not None and living and not generation.is_ending:
                self._say(report)
            await trio.sleep(min(timeout_s / _LOOKS_EACH_TIMEOUT, _LONGEST_LOOK_S))

    async def _trace(self, number: int) -> None:
        generation = self._current
        if generation is None or generation.number != number:
            return
        living = generation.living
        for rank in living:
            rank.handle.ask_for_stack()
        await trio.sleep(_STACK_S)
        stacks = tuple((rank.setup.rank, rank.handle.stack()) for rank in living)
        groups = tuple((rank.setup.rank, records) for rank in living if (records := rank.handle.groups()))
        self._say(protocol.RankStacks(generation=number, stacks=stacks, groups=groups))

    # --- output ------------------------------------------------------------------------------------------------------

    async def _show_output(self, generation: _Generation) -> None:
        while not generation.gone.is_set():
            self._take_output(generation, is_last=False)
            await trio.sleep(_LOOK_S)

    async def _show_rest(self, generation: _Generation) -> None:
        with trio.move_on_after(_LAST_WORDS_S) as patience:
            num_shown = self._num_shown
            while not self._take_output(generation, is_last=True):
                if self._num_shown > num_shown:
                    num_shown, patience.deadline = self._num_shown, trio.current_time() + _LAST_WORDS_S
                await trio.sleep(_LOOK_S)

    def _take_output(self, generation: _Generation, *, is_last: bool) -> bool:
        """Offer the ranks' output; return whether nothing of it is left."""
        problems = [problem for rank in generation.ranks if (problem := rank.handle.new_problem()) is not None]
        if problems and not generation.is_unwritten:
            generation.is_unwritten = True
            self._say(protocol.RanksUnwritten(problem=problems[0]))
        left = [rank for rank in generation.ranks if not self._show_new(rank, is_last=is_last)]
        return not left

    def _show_new(self, rank: _Rank, *, is_last: bool) -> bool:
        for is_error in (False, True):
            if not is_shown(rank.setup, is_error=is_error):
                continue
            while text := rank.handle.new_output(is_error=is_error, is_last=is_last):
                shown = shown_text(rank.setup, text, is_error=is_error)
                if not self._show(protocol.RankOutput(rank=rank.setup.rank, is_error=is_error, text=shown)):
                    return False
                rank.handle.note_shown(is_error=is_error)
                self._num_shown += 1
        return True


def _kill(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.handle.kill()
