"""Virtual ranks of a script, and the host that starts them: the twin of `runtime.agent.ranks`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from oobleck.control import protocol
from oobleck.control.node_ranks import RankSetup
from oobleck.control.protocol import Exited, ForkServerEnded, Killed, ProcessEnd, RankError
from oobleck.job.ranks import RanksSpec

from .fabric import Violation
from .gate import Gate
from .world import World

_KILLED = Killed(signal=9)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualScript:
    work_s: float = 10.0
    """The work of a rank, from the start of its generation until it ends well."""
    ending_s: float = 0.5
    """From SIGTERM to a rank's end."""
    leaves_s: float | None = None
    """From a loss until a rank waits for its next place; None: it has no attempts, and ends with its generation."""


@dataclass(eq=False)
class VirtualRank:
    """Implements `roles.agent_ports.RankHandle`."""

    setup: RankSetup
    node: str
    pid: int
    script: VirtualScript
    gate: Gate
    check_alone: Callable[[int], None]
    """Checks that ranks of a generation may start on the node."""
    is_warm = False
    end: ProcessEnd | None = field(init=False, default=None)
    has_worked: bool = field(init=False, default=False)
    """Whether all its work was done when it ended."""

    def __post_init__(self) -> None:
        self._asked, self._ended, self._left = trio.Event(), trio.Event(), trio.Event()
        self._interrupted, self._placed = trio.Event(), trio.Event()
        self.places: list[RankSetup] = []
        """All places that it has had, in order."""

    @property
    def can_stay(self) -> bool:
        return self.script.leaves_s is not None

    @property
    def waits(self) -> bool:
        """Whether it has no part in any generation."""
        return self._left.is_set()

    async def run(self, *, is_spare: bool = False) -> None:
        """Work and end well, or end once asked; a frozen rank ends when it thaws."""
        while True:
            if is_spare:
                await trio.sleep(self.script.ending_s)
            elif not await self._is_interrupted():
                break
            is_spare = False
            await self.gate.passed()
            self._placed = trio.Event()
            self._left.set()
            await self._placed.wait()
        await self.gate.passed()
        self.has_worked = self.end is None and not self._asked.is_set()
        self._finish(Exited(exit_code=0))

    async def _is_interrupted(self) -> bool:
        """Work; return whether an interruption came first."""
        is_interrupted = False

        async def leave_when_interrupted() -> None:
            nonlocal is_interrupted
            await self._interrupted.wait()
            await trio.sleep(self.script.leaves_s or 0.0)
            is_interrupted = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_when_interrupted)
            with trio.move_on_after(self.script.work_s):
                await self._asked.wait()
                await trio.sleep(self.script.ending_s)
            nursery.cancel_scope.cancel()
        return is_interrupted

    async def place(self, setup: RankSetup) -> bool:
        await self.gate.passed()
        self.check_alone(setup.order.generation)
        if self.end is not None:
            return False
        self.setup = setup
        self.places.append(setup)
        self._left, self._interrupted = trio.Event(), trio.Event()
        self._placed.set()
        return True

    def _finish(self, end: ProcessEnd) -> None:
        if self.end is None:
            self.end = end
            self._ended.set()

    async def wait(self) -> ProcessEnd | None:
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                await self._left.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(leave)
            await self._ended.wait()
            nursery.cancel_scope.cancel()
        await self.gate.passed()
        return self.end

    def interrupt(self, *, after_save: bool) -> None:
        self._interrupted.set()

    def ask_to_end(self) -> None:
        self._asked.set()

    def kill(self) -> None:
        self._finish(_KILLED)

    def error(self, end: ProcessEnd) -> RankError | None:
        return None

    def written_bytes(self) -> int:
        return 0

    def used_s(self) -> float:
        return trio.current_time()

    def ask_for_stack(self) -> None:
        """Do nothing: virtual ranks have no stacks."""

    def stack(self) -> str:
        return ""

    def groups(self) -> tuple[()]:
        return ()

    def new_output(self, *, is_error: bool, is_last: bool) -> str:
        return ""

    def new_problem(self) -> str | None:
        return None

    def note_shown(self, *, is_error: bool) -> None:
        raise AssertionError("virtual ranks write nothing")


@dataclass(eq=False)
class VirtualRankHost:
    """Implements `roles.agent_ports.RankHost` on one node; its ranks save no states."""

    world: World
    gate: Gate
    nursery: trio.Nursery
    script: VirtualScript
    node: str
    new_pid: Callable[[], int]
    note: Callable[[VirtualRank], None]
    """Receives each new rank, and spare."""

    def __post_init__(self) -> None:
        self._ranks: list[VirtualRank] = []
        self._holds_nothing = trio.Event()
        self._port = 1 << 10
        self._send_end, self._server_ends = trio.open_memory_channel[ForkServerEnded](math.inf)

    async def run(self) -> None:
        await trio.sleep_forever()

    async def prepare(self, run: RanksSpec, devices: tuple[int, ...]) -> int:
        await trio.sleep(self.world.delays.warm_up_s)
        return len(devices)

    def address_of(self, name: str) -> str:
        return name

    async def open_door(self, run: RanksSpec, address: str) -> None:
        await trio.lowlevel.checkpoint()

    def keep_in_memory(self, order: protocol.KeepStates) -> None:
        """Do nothing: no state is in memory."""

    def recall(self) -> None:
        self._holds_nothing.set()

    def copy(self, order: protocol.CopyParts) -> None:
        raise AssertionError("virtual ranks save nothing")

    async def next_report(self) -> protocol.StatesHeld:
        await self._holds_nothing.wait()
        self._holds_nothing = trio.Event()
        return protocol.StatesHeld(parts=())

    def num_saved(self) -> int:
        return 0

    async def keep_states(self, *, is_planned: bool, is_last: bool) -> None:
        await trio.lowlevel.checkpoint()

    async def settle(self) -> None:
        await trio.lowlevel.checkpoint()

    async def leave(self) -> None:
        """Do nothing: no state is in memory."""

    def reserve_port(self) -> int:
        self._port += 1
        return self._port

    def is_warm(self) -> bool:
        return True

    def _check_alone(self, generation: int) -> None:
        for other in self._ranks:
            if other.end is None and other.places and not other.waits and other.setup.order.generation != generation:
                raise Violation(f"a rank of generation {generation} starts on {self.node} beside {other.setup}")

    async def start(self, setup: RankSetup, *, is_spare: bool = False) -> VirtualRank:
        await trio.sleep(self.world.delays.start_worker_s)
        await self.gate.passed()
        rank = VirtualRank(setup, self.node, self.new_pid(), self.script, self.gate, self._check_alone)
        if not is_spare:
            self._check_alone(setup.order.generation)
            rank.places.append(setup)
        self.note(rank)
        self._ranks.append(rank)
        self.nursery.start_soon(partial(rank.run, is_spare=is_spare))
        return rank

    async def server_ended(self) -> ForkServerEnded:
        end = await self._server_ends.receive()
        await self.gate.passed()
        return end

    def end_server(self) -> None:
        """End the fork server: living ranks stay."""
        self._send_end.send_nowait(ForkServerEnded(end=_KILLED, is_restarted=True))

    def crash(self, device: int) -> None:
        for rank in self._ranks:
            if rank.places and rank.setup.local_rank == device:
                rank.kill()

    def wake(self) -> None:
        """Do nothing: ranks wait at the gate."""

    def end_all(self) -> None:
        for rank in self._ranks:
            rank.kill()
