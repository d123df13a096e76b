"""Virtual nodes: the twin of `runtime.cluster`, and what faults do to them.

A node is a machine that is there or not, its agent (the real coroutine, on virtual ports), and its workers. The
master reaches it over a link that carries real frames.
"""

from __future__ import annotations

from collections.abc import Iterable
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

from .links import VirtualLink
from .relays import VirtualRelays
from .workers import VirtualWorkerHost
from .world import Gate, World

PYTHON_VERSION = "3.11.0"
"""What virtual nodes run, whatever runs the simulation: journals must not depend on it."""
_CONNECT_TIMEOUT_S = 10.0
_COMMAND_TIMEOUT_S = 5.0
_KEEPALIVE_S = 15.0
"""After so long without an answer a connection is given up by the master's side, as SSH does."""
_CONNECTION_OUTLIVES_S = 6.0
"""So long a connection is silent, and up to twice as long, before one of its ends finds that it is cut."""
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
        """An idle link costs nothing here."""

    async def receive(self) -> FromAgent:
        try:
            return await super().receive()
        except trio.BrokenResourceError as error:
            if self._link.is_way_lost:
                raise LinkLost(str(error)) from error
            raise


class _AgentProcess:
    """An agent and its workers: they end together."""

    def __init__(self, machine: _Machine, tag: str, world: World, relays: VirtualRelays) -> None:
        self.pid = machine.next_pid()
        self.links: list[VirtualLink] = []
        self.frozen_until_s = 0.0
        self.agent: Agent | None = None
        self.host: VirtualWorkerHost | None = None
        self._machine = machine
        self._tag = tag
        self._world = world
        self._relays = relays
        self._scope = trio.CancelScope()
        self._connections, self._accepting = trio.open_memory_channel[MasterConnection](16)

    def connect(self) -> VirtualLink:
        """Open a link from the master."""
        link = VirtualLink(self._world.time, latency_s=self._world.delays.link_latency_s)
        if self._machine.is_cut_off:
            link.hold()
        if self._machine.gate.is_closed or self._world.time.now_s < self.frozen_until_s:
            link.far.freeze()
        self.links.append(link)
        self._connections.send_nowait(MessageChannel(link.far, FrameDecoder(MasterMessage)))
        return link

    async def run(self) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await self._serve(nursery)
                    nursery.cancel_scope.cancel()
        finally:
            self.end()

    async def _serve(self, nursery: trio.Nursery) -> None:
        machine = self._machine
        self.host = VirtualWorkerHost(
            self._world, machine.gate, nursery, pids=machine.next_pid, clock=machine.clock, warm_up=machine.warm_up
        )
        self.agent = agent = Agent(
            tag=self._tag,
            accept=self._accepting.receive,
            workers=self.host,
            hello=self._hello,
            cache_dir=Path("/virtual"),
            relays=self._relays.of(machine.name),
        )
        await agent.run()

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
        """End it here and now; its connections are closed. With `loses_words`, what is under way on them is lost."""
        self._scope.cancel()
        if self.host is not None:
            self.host.end_all()
        for link in self.links:
            if loses_words:
                link.cut()
            else:
                link.far.close()
        self.links.clear()
        if self._machine.agent is self:
            self._machine.agent = None


class _Machine:
    """One node's machine."""

    def __init__(self, name: str, world: World, pids: Iterable[int]) -> None:
        self.name = name
        self.is_up = False
        self.is_cut_off = False
        """The master does not reach it."""
        self.gate = Gate()
        self.agent: _AgentProcess | None = None
        self.tending = trio.Lock()
        """Held while its agent is started or cleaned up after: it may be reached while it is still cleaned."""
        self._pids = iter(pids)
        self._world = world
        self._clock_offset_s = world.up_to(_CLOCKS_APART_S)
        self._warm_s: float | None = None
        self._heard = trio.lowlevel.ParkingLot()

    def clock(self) -> float:
        """Its own monotonic clock."""
        return self._world.time.now_s + self._clock_offset_s

    def next_pid(self) -> int:
        return next(self._pids)

    def warm_up(self) -> float:
        """Seconds until it can fork workers; counted from the first time it is asked."""
        if self._warm_s is None:
            self._warm_s = self._world.time.now_s + self._world.delays.warm_up_s
        return max(0.0, self._warm_s - self._world.time.now_s)

    def end_fork_server(self) -> None:
        """The process that forks workers ends, if there is one; the next one is begun at once."""
        if self._warm_s is not None and self.agent is not None and self.agent.host is not None:
            self._warm_s = self._world.time.now_s + self._world.delays.warm_up_s
            self.agent.host.end_server()

    @property
    def links(self) -> list[VirtualLink]:
        """From the master to its agent."""
        return [] if self.agent is None else self.agent.links

    @property
    def is_silent(self) -> bool:
        """Nothing comes back from it, not even that it is gone."""
        return self.is_up and (self.is_cut_off or self.gate.is_closed)

    async def answers(self) -> None:
        """Wait until something comes back from it."""
        while self.is_silent:
            await self._heard.park()

    def wake(self) -> None:
        """Something about it has changed: let those who wait for it look again."""
        self._heard.unpark_all()
        if self.agent is not None and self.agent.host is not None:
            self.agent.host.wake()

    def lose_power(self, *, loses_words: bool) -> None:
        self.is_up = False
        self._warm_s = None
        if self.agent is not None:
            self.agent.end(loses_words=loses_words)
        self.gate.open()
        self.wake()


class VirtualCluster:
    """Implements `roles.master_ports.Cluster`; the methods below `clean` are the faults."""

    def __init__(self, tag: str, names: Iterable[str], world: World, nursery: trio.Nursery) -> None:
        """`names` are all nodes that will ever be there; `join` brings them up."""
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
            if not machine.is_up:
                raise NodeUnreachable(node.name, "its connection was lost while its agent was started")
            if attach and machine.agent is None:
                raise AgentGone(node.name, "its agent is gone")
            if machine.agent is None:
                machine.agent = _AgentProcess(machine, self._tag, self._world, self._relays)
                self._nursery.start_soon(machine.agent.run)
            link = machine.agent.connect()
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
        """End all agents, those out of reach too: a run that starts again finds nothing of the one before."""
        for machine in self._machines.values():
            if machine.agent is not None:
                machine.agent.end()
        self._world.fabric.forget()

    def is_alive(self, node: NodeSpec) -> bool:
        """Return whether an agent lives on a node that can be reached."""
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
        """A machine comes up, with nothing on it."""
        self._machines[name].is_up = True

    def lose(self, name: str) -> None:
        """A machine goes down. Its last words may be lost with it, or still arrive."""
        self._machines[name].lose_power(loses_words=self._world.rng.random() < 0.5)

    def freeze(self, name: str) -> None:
        """Nothing moves on a node any more, and nothing says so."""
        machine = self._machines[name]
        machine.gate.close()
        self._note_frost(machine)
        self._nursery.start_soon(self._give_up_links, machine)

    def thaw(self, name: str) -> None:
        """A frozen node continues where it stood."""
        machine = self._machines[name]
        machine.gate.open()
        self._note_frost(machine)

    def freeze_agent(self, name: str, frozen_s: float) -> None:
        """The agent of a node is stopped for a while; its workers continue."""
        machine = self._machines[name]
        if (process := machine.agent) is not None:
            process.frozen_until_s = max(process.frozen_until_s, self._world.time.now_s + frozen_s)
            self._note_frost(machine)
            self._nursery.start_soon(self._thaw_agent, machine)

    async def _thaw_agent(self, machine: _Machine) -> None:
        if machine.agent is not None:
            await trio.sleep_until(machine.agent.frozen_until_s)
            self._note_frost(machine)

    def freeze_master(self, until_s: float) -> None:
        """The master is stopped: it reads nothing and says nothing, until it is thawed."""
        self._master_frozen_until_s = until_s
        for link in self._links():
            link.near.freeze()

    def thaw_master(self) -> None:
        """It continues where it stood, or another has taken its place."""
        self._master_frozen_until_s = 0.0
        for link in self._links():
            link.near.thaw()

    def _links(self) -> list[VirtualLink]:
        return [link for machine in self._machines.values() for link in machine.links]

    def notice(self, name: str) -> None:
        """The agent of a node learns that the node will be taken away."""
        process = self._machines[name].agent
        if process is not None and process.agent is not None:
            process.agent.request_leave("its provider takes it away")

    def slow_down(self, name: str, factor: float) -> None:
        """A node's programs take so many times as long as usual."""
        self._world.tempo.set_factor(name, factor)

    def crash_worker(self, name: str, device: int) -> None:
        agent = self._machines[name].agent
        if agent is not None and agent.host is not None:
            for process in agent.host.processes:
                if process.worker_id.device == device:
                    process.kill()

    def crash_fork_server(self, name: str) -> None:
        """What forks a node's workers ends by a signal: those that live continue, others wait for the next one."""
        self._machines[name].end_fork_server()

    def crash_agent(self, name: str) -> None:
        """An agent ends, and its workers with it; the machine is well."""
        agent = self._machines[name].agent
        if agent is not None:
            agent.end(loses_words=self._world.rng.random() < 0.5)

    def separate(self, names: Iterable[str]) -> None:
        """From now on these nodes reach one another, but neither the others nor the master."""
        nodes = tuple(names)
        self._world.fabric.separate(nodes)
        self._relays.settle()
        for name in nodes:
            machine = self._machines[name]
            machine.is_cut_off = True
            for link in machine.links:
                link.hold()
            self._nursery.start_soon(self._give_up_links, machine)

    def cut_links(self, names: Iterable[str]) -> None:
        """From now on these nodes reach one another and the master, but no other nodes.

        Connections outlive that for a while, and then fail.
        """
        self._world.fabric.separate(names)
        self._relays.settle()
        fails_s = self._world.time.now_s + _CONNECTION_OUTLIVES_S + self._world.up_to(_CONNECTION_OUTLIVES_S)
        self._world.time.call_at(fails_s, self._world.fabric.break_connections)

    def heal(self) -> None:
        self._world.fabric.heal()
        self._relays.settle()
        for machine in self._machines.values():
            machine.is_cut_off = False
            for link in machine.links:
                link.release()
            machine.wake()

    async def _give_up_links(self, machine: _Machine) -> None:
        """Nothing has come from a machine: the master's side of its connections ends."""
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

    def _note_frost(self, machine: _Machine) -> None:
        is_frozen = self._is_agent_frozen(machine.name)
        for link in machine.links:
            if is_frozen:
                link.far.freeze()
            else:
                link.far.thaw()
        self._relays.settle()
        machine.wake()
