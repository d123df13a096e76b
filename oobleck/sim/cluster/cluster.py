"""Virtual nodes: the twin of `runtime.cluster`, with the faults that strike them.

A node is a machine that is up or down, its agent (the real coroutine, on virtual ports), and its workers. The master
reaches it over a link that carries real frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path

import trio

from oobleck import __version__
from oobleck.control.protocol import PROTOCOL_VERSION, FromAgent, Hello, MasterMessage, WorkerStarted
from oobleck.errors import AgentGone, NodeUnreachable
from oobleck.job import NodeSpec
from oobleck.roles.agent import Agent
from oobleck.roles.agent_ports import MasterConnection
from oobleck.roles.channel import MessageChannel
from oobleck.roles.master_ports import LinkLost
from oobleck.wire import FrameDecoder

from .gate import Gate
from .links import VirtualLink
from .ranks import VirtualRankHost
from .relays import VirtualRelays
from .workers import VirtualWorkerHost
from .world import World

PYTHON_VERSION = "3.11.0"
"""The version on virtual nodes, constant so that journals do not depend on the simulation's own."""
NewRankHost = Callable[..., VirtualRankHost]
_CONNECT_TIMEOUT_S = 10.0
_COMMAND_TIMEOUT_S = 5.0
# The master's side abandons a connection after this silence, as SSH does.
_KEEPALIVE_S = 15.0
# A cut connection stays silent for once to twice this long before one of its ends finds that it failed.
_CONNECTION_OUTLIVES_S = 6.0
# Each machine's monotonic clock has its own zero: a comparison of two of them has to show.
_CLOCKS_APART_S = 1000.0
_MEMORY_BYTES = 1 << 40
_NUM_CORES = 8


class _Tunnel(MessageChannel[MasterMessage, FromAgent]):
    """The master's end of a link to an agent."""

    takes_calls = True

    def __init__(self, link: VirtualLink, address: str) -> None:
        super().__init__(link.near, FrameDecoder(FromAgent))
        self._link = link
        self.address = address

    def rest(self, is_resting: bool) -> None:
        """Do nothing: an idle virtual link costs nothing."""

    async def receive(self) -> FromAgent:
        try:
            return await super().receive()
        except trio.BrokenResourceError as error:
            if self._link.is_way_lost:
                raise LinkLost(str(error)) from error
            raise


class _AgentProcess:
    """An agent and its workers or ranks, which end together."""

    def __init__(
        self, machine: _Machine, tag: str, world: World, relays: VirtualRelays, new_rank_host: NewRankHost | None
    ) -> None:
        self.pid = machine.next_pid()
        self.links: list[VirtualLink] = []
        self.frozen_until_s = 0.0
        self.agent: Agent | None = None
        self.host: VirtualWorkerHost | VirtualRankHost | None = None
        self._machine = machine
        self._tag = tag
        self._world = world
        self._relays = relays
        self._new_rank_host = new_rank_host
        self._scope = trio.CancelScope()
        self._connections, self._accepting = trio.open_memory_channel[MasterConnection](16)

    def connect(self) -> VirtualLink:
        link = VirtualLink(self._world.time, latency_s=self._world.delays.link_latency_s)
        # The node may have been cut off or frozen while its agent was started.
        if self._machine.is_cut_off:
            link.hold()
        if self._machine.gate.is_closed or self._world.time.now_s < self.frozen_until_s:
            link.far.freeze()
        self.links.append(link)
        self._connections.send_nowait(MessageChannel(link.far, FrameDecoder(MasterMessage)))
        return link

    async def run(self) -> None:
        machine = self._machine
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    workers = ranks = None
                    if self._new_rank_host is not None:
                        self.host = ranks = self._new_rank_host(
                            gate=machine.gate, nursery=nursery, node=machine.name, new_pid=machine.next_pid
                        )
                    else:
                        self.host = workers = VirtualWorkerHost(
                            self._world,
                            machine.gate,
                            nursery,
                            pids=machine.next_pid,
                            clock=machine.clock,
                            warm_up=machine.warm_up,
                        )
                    self.agent = Agent(
                        tag=self._tag,
                        accept=self._accepting.receive,
                        workers=workers,
                        ranks=ranks,
                        hello=self._hello,
                        cache_dir=Path("/virtual"),
                        relays=self._relays.of(machine.name),
                    )
                    await self.agent.run()
                    # Workers and ranks end with their agent.
                    nursery.cancel_scope.cancel()
        finally:
            self.end()

    def _hello(self, generation: int, workers: tuple[WorkerStarted, ...]) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            oobleck_version=__version__,
            python_version=PYTHON_VERSION,
            node=self._machine.name,
            pid=self.pid,
            generation=generation,
            workers=workers,
            num_cores=_NUM_CORES,
            memory_bytes=_MEMORY_BYTES,
            clock_s=self._machine.clock(),
        )

    def end(self, *, loses_words: bool = False) -> None:
        """End the process at once and close its connections; with `loses_words`, messages in flight are lost."""
        self._scope.cancel()
        if self.host is not None:
            self.host.end_all()
        for link in self.links:
            if loses_words:
                link.cut()
            else:
                link.far.close()
        self.links.clear()
        # `run` calls this once more, when a successor may be in its place.
        if self._machine.agent is self:
            self._machine.agent = None


class _Machine:
    def __init__(self, name: str, world: World, pids: Iterable[int]) -> None:
        self.name = name
        self.is_up = False
        self.is_cut_off = False  # from the master
        self.gate = Gate()
        self.agent: _AgentProcess | None = None
        # Held during the start and the cleaning of its agent: the master may reach a node that is still being cleaned.
        self.tending = trio.Lock()
        self._pids = iter(pids)
        self._world = world
        self._clock_offset_s = world.up_to(_CLOCKS_APART_S)
        self._warm_s: float | None = None
        self._heard = trio.lowlevel.ParkingLot()

    def clock(self) -> float:
        return self._world.time.now_s + self._clock_offset_s

    def next_pid(self) -> int:
        return next(self._pids)

    def warm_up(self) -> float:
        """Return the seconds until the machine can fork workers; the first call starts the fork server."""
        if self._warm_s is None:
            self._warm_s = self._world.time.now_s + self._world.delays.warm_up_s
        return max(0.0, self._warm_s - self._world.time.now_s)

    def end_fork_server(self) -> None:
        """End the fork server, if there is one, and start the next one."""
        if self._warm_s is not None and self.agent is not None and self.agent.host is not None:
            self._warm_s = self._world.time.now_s + self._world.delays.warm_up_s
            self.agent.host.end_server()

    @property
    def links(self) -> list[VirtualLink]:
        return [] if self.agent is None else self.agent.links

    @property
    def is_silent(self) -> bool:
        """Whether nothing comes back, not even an error."""
        return self.is_up and (self.is_cut_off or self.gate.is_closed)

    async def answers(self) -> None:
        while self.is_silent:
            await self._heard.park()

    def wake(self) -> None:
        self._heard.unpark_all()
        if self.agent is not None and self.agent.host is not None:
            self.agent.host.wake()

    def lose_power(self, *, loses_words: bool) -> None:
        self.is_up = False
        self._warm_s = None
        if self.agent is not None:
            self.agent.end(loses_words=loses_words)
        # A machine that comes up again is not frozen.
        self.gate.open()
        self.wake()


class VirtualCluster:
    """Implements `roles.master_ports.Cluster`, and the faults of traces."""

    def __init__(
        self,
        tag: str,
        names: Iterable[str],
        world: World,
        nursery: trio.Nursery,
        new_rank_host: NewRankHost | None = None,
    ) -> None:
        """Take the names of all nodes that ever join; `join` brings them up.

        With `new_rank_host`, agents start the ranks of a script, else the workers of a job.
        """
        self._new_rank_host = new_rank_host
        self._tag = tag
        self._world = world
        self._nursery = nursery
        pids = count(1000)
        self._machines = {name: _Machine(name, world, pids) for name in names}
        self._master_frozen_until_s = 0.0
        self._relays = VirtualRelays(world, self._is_agent_frozen)

    async def reach(self, node: NodeSpec, *, attach: bool) -> _Tunnel:
        machine = self._machine(node)
        async with machine.tending:
            await self._shake_hands(machine, timeout_s=_CONNECT_TIMEOUT_S)
            if machine.agent is not None and not attach:
                machine.agent.end()
            await trio.sleep(self._world.delays.start_agent_s)
            # Its power may have gone during the sleep.
            if not machine.is_up:
                raise NodeUnreachable(node.name, "its connection was lost while its agent was started")
            if attach and machine.agent is None:
                raise AgentGone(node.name, "its agent is gone")
            if machine.agent is None:
                machine.agent = _AgentProcess(machine, self._tag, self._world, self._relays, self._new_rank_host)
                self._nursery.start_soon(machine.agent.run)
            link = machine.agent.connect()
            # The call may have begun before the master froze.
            if self._world.time.now_s < self._master_frozen_until_s:
                link.near.freeze()
            return _Tunnel(link, f"address of {node.name}")

    async def kill(self, node: NodeSpec) -> bool:
        machine = self._machine(node)
        await self._shake_hands(machine, timeout_s=_COMMAND_TIMEOUT_S)
        if machine.agent is None:
            return False
        machine.agent.end()
        return True

    async def clean(self, node: NodeSpec) -> None:
        with suppress(NodeUnreachable):
            async with self._machine(node).tending:
                await self.kill(node)

    def end_all(self) -> None:
        """End all agents, also unreachable ones, so that a restarted run finds nothing of the previous one."""
        for machine in self._machines.values():
            if machine.agent is not None:
                machine.agent.end()
        self._world.fabric.forget()

    def is_alive(self, node: NodeSpec) -> bool:
        """Return whether an agent lives on a reachable node."""
        machine = self._machine(node)
        return machine.agent is not None and not machine.is_silent

    def _machine(self, node: NodeSpec) -> _Machine:
        if node.name not in self._machines:
            raise NodeUnreachable(node.name, "no such host")
        return self._machines[node.name]

    async def _shake_hands(self, machine: _Machine, *, timeout_s: float) -> None:
        await trio.sleep(self._world.delays.connect_s)
        with trio.move_on_after(timeout_s):
            await machine.answers()
        if machine.is_silent:
            raise NodeUnreachable(machine.name, "timed out")
        if not machine.is_up:
            raise NodeUnreachable(machine.name, "no route to host")

    def join(self, name: str) -> None:
        self._machines[name].is_up = True

    def lose(self, name: str) -> None:
        # The last messages are lost, or still arrive: both happen.
        self._machines[name].lose_power(loses_words=self._world.rng.random() < 0.5)

    def freeze(self, name: str) -> None:
        """Freeze all processes of a node, with its connections open."""
        machine = self._machines[name]
        machine.gate.close()
        self._settle(machine)
        # A frozen node leaves its connections open, so only the silence ends them.
        self._nursery.start_soon(self._abandon_links, machine)

    def thaw(self, name: str) -> None:
        machine = self._machines[name]
        machine.gate.open()
        self._settle(machine)

    def freeze_agent(self, name: str, frozen_s: float) -> None:
        """Freeze a node's agent for a while; its workers continue."""
        machine = self._machines[name]
        if (process := machine.agent) is not None:
            process.frozen_until_s = max(process.frozen_until_s, self._world.time.now_s + frozen_s)
            self._settle(machine)
            self._nursery.start_soon(self._thaw_agent, machine)

    async def _thaw_agent(self, machine: _Machine) -> None:
        if machine.agent is not None:
            await trio.sleep_until(machine.agent.frozen_until_s)
            self._settle(machine)

    def freeze_master(self, until_s: float) -> None:
        """Let the master neither read nor write until then, or until it thaws; 0 thaws it, or a successor."""
        self._master_frozen_until_s = until_s
        for machine in self._machines.values():
            for link in machine.links:
                link.near.freeze(until_s > 0)

    def notice(self, name: str) -> None:
        """Tell a node's agent that the node will be taken away."""
        process = self._machines[name].agent
        if process is not None and process.agent is not None:
            process.agent.request_leave("its provider takes it away")

    def slow_down(self, name: str, factor: float) -> None:
        """Let a node's programs take `factor` times as long as usual."""
        self._world.tempo.set_factor(name, factor)

    def crash_worker(self, name: str, device: int) -> None:
        agent = self._machines[name].agent
        if agent is not None and agent.host is not None:
            agent.host.crash(device)

    def crash_fork_server(self, name: str) -> None:
        """Kill a node's fork server: living workers continue, new ones wait for the next fork server."""
        self._machines[name].end_fork_server()

    def crash_agent(self, name: str) -> None:
        """Kill a node's agent with its workers; the machine stays up."""
        agent = self._machines[name].agent
        if agent is not None:
            agent.end(loses_words=self._world.rng.random() < 0.5)

    def separate(self, names: Iterable[str]) -> None:
        """Let these nodes reach one another, but neither the others nor the master."""
        nodes = tuple(names)
        self._world.fabric.separate(nodes)
        self._relays.settle()
        for name in nodes:
            machine = self._machines[name]
            machine.is_cut_off = True
            for link in machine.links:
                link.hold()
            self._nursery.start_soon(self._abandon_links, machine)

    def cut_links(self, names: Iterable[str]) -> None:
        """Let these nodes reach one another and the master, but no other nodes; connections fail after a while."""
        self._world.fabric.separate(names)
        self._relays.settle()
        # Packets are dropped, not refused: until a timeout, connections only stay silent.
        fails_s = self._world.time.now_s + _CONNECTION_OUTLIVES_S + self._world.up_to(_CONNECTION_OUTLIVES_S)
        self._world.time.call_at(fails_s, self._world.fabric.break_connections)

    def heal(self) -> None:
        # Relays ask the fabric which nodes reach each other, so it changes first.
        self._world.fabric.heal()
        self._relays.settle()
        for machine in self._machines.values():
            machine.is_cut_off = False
            for link in machine.links:
                link.release()
            machine.wake()

    async def _abandon_links(self, machine: _Machine) -> None:
        """End the master's side of a machine's connections if the machine stays silent."""
        silent = tuple(machine.links)
        with trio.move_on_after(_KEEPALIVE_S):
            await machine.answers()
            return
        for link in silent:
            link.abandon()

    def _is_agent_frozen(self, name: str) -> bool:
        machine = self._machines[name]
        is_stopped = machine.agent is not None and self._world.time.now_s < machine.agent.frozen_until_s
        return machine.gate.is_closed or is_stopped

    def _settle(self, machine: _Machine) -> None:
        """Let a machine's links behave as its agent does now, frozen or not."""
        is_frozen = self._is_agent_frozen(machine.name)
        for link in machine.links:
            link.far.freeze(is_frozen)
        self._relays.settle()
        machine.wake()
