"""Links between virtual agents, and their faults: the twin of `runtime.relay_network`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from oobleck.control.protocol import RelayOpen

from .links import VirtualLink, VirtualStream
from .world import World

_TICKET = bytes(16)


@dataclass(frozen=True, slots=True)
class _Edge:
    caller: str
    listener: str
    link: VirtualLink


class VirtualRelays:
    """All links between agents. Call `settle` whenever a node was frozen, thawed or cut off."""

    def __init__(self, world: World, is_frozen: Callable[[str], bool]) -> None:
        self._world = world
        self._is_frozen = is_frozen
        self.listeners: dict[str, _Listener] = {}  # the newest of each machine, by address
        self._edges: list[_Edge] = []

    def of(self, node: str) -> _Network:
        return _Network(self, node)

    def settle(self) -> None:
        """Let each link behave as its ends do now."""
        for edge in self._edges:
            self._settle(edge)
        self._edges = [edge for edge in self._edges if not edge.link.is_over]

    def _settle(self, edge: _Edge) -> None:
        if self._world.fabric.reaches(edge.caller, edge.listener):
            edge.link.release()
        else:
            edge.link.hold()
        edge.link.near.freeze(self._is_frozen(edge.caller))
        edge.link.far.freeze(self._is_frozen(edge.listener))

    async def dial(self, node: str, address: str) -> VirtualStream:
        """Connect a node's agent to the one that listens at an address. Raises ConnectionRefusedError."""
        latency_s = self._world.delays.link_latency_s
        # Connecting takes a round trip.
        await trio.sleep(2 * latency_s)
        listener = self.listeners.get(address)
        if listener is None or listener.is_closed:
            raise ConnectionRefusedError("no agent listens there")
        edge = _Edge(node, listener.node, VirtualLink(self._world.time, latency_s=latency_s))
        self._edges.append(edge)
        self._settle(edge)
        listener.post.send_nowait(edge.link.far)
        return edge.link.near


class _Listener:
    """Implements `roles.agent_ports.RelayListener`."""

    def __init__(self, node: str, address: str) -> None:
        self.node = node
        self.is_closed = False
        self.door = RelayOpen(host=address, port=1, ticket=_TICKET)
        self.post, self._callers = trio.open_memory_channel[trio.abc.Stream](1 << 16)

    async def accept(self) -> trio.abc.Stream:
        return await self._callers.receive()

    async def greet(self, caller: trio.abc.Stream) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return caller

    async def aclose(self) -> None:
        self.is_closed = True
        await trio.lowlevel.checkpoint()


@dataclass(frozen=True, slots=True)
class _Network:
    """Implements `roles.agent_ports.RelayNetwork`."""

    relays: VirtualRelays
    node: str

    async def listen(self, address: str) -> _Listener:
        await trio.lowlevel.checkpoint()
        listener = self.relays.listeners[address] = _Listener(self.node, address)
        return listener

    async def dial(self, host: str, port: int, ticket: bytes) -> trio.abc.Stream:
        return await self.relays.dial(self.node, host)
