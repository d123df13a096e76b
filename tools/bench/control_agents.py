"""The nodes of `control_plane.py`: real agents behind real sockets, in one process, with placeholder workers.

    python tools/bench/control_agents.py --nodes 256 --directory DIR --profile FILE --tag bench

Each node is an `oobleck.roles.agent.Agent` that listens at `DIR/<node>.sock`, as an agent's process does. Its worker
is the simulator's: it answers fences, forms groups with its peers, commits steps with all others and tells its pace;
only that it sleeps, in real time, in place of computing.

A line on the input is a command: `counts` is answered with what went to and fro, `lose NODE` takes a node's power away.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random

import trio

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck import __version__
from oobleck.control.protocol import (
    PROTOCOL_VERSION,
    FromAgent,
    Hello,
    MasterMessage,
    SetUpWorker,
    WorkerStarted,
)
from oobleck.planner import profile_from_json
from oobleck.roles.agent import Agent
from oobleck.roles.agent_ports import MasterConnection
from oobleck.roles.channel import MessageChannel
from oobleck.runtime.descriptors import raise_descriptor_limit
from oobleck.runtime.relay_network import RelaySockets
from oobleck.sim.cluster import Delays, Gate, Tempo, VirtualTime, VirtualWorkerHost, WorkerProcess, World
from oobleck.sim.costs import NodeKinds
from oobleck.wire import FrameDecoder

_DELAYS = Delays(warm_up_s=0.5, set_up_worker_s=0.2, profile_s=0.2)
"""Of the start: what workers do by themselves costs the master nothing."""
_MEMORY_BYTES = 1 << 40


class _RealTime(VirtualTime):
    """The simulator's clock, by which real seconds pass."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return time.monotonic()

    def current_time(self) -> float:
        return self.now_s

    def call_at(self, t_s: float, wake: Callable[[], None]) -> None:
        heappush(self._due, (t_s, next(self._numbers), wake))

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Make the calls that are due; then sleep until the next one, or the deadline."""
        while self._due and self._due[0][0] <= self.now_s:
            heappop(self._due)[2]()
            deadline = -math.inf  # somebody may be able to run now
        return max(0.0, min(deadline, self._due[0][0] if self._due else math.inf) - self.now_s)


class _CountingChannel(MessageChannel[FromAgent, MasterMessage]):
    """A channel to the master that counts."""

    def __init__(self, stream: trio.abc.Stream, counts: Counter[str]) -> None:
        super().__init__(stream, FrameDecoder(MasterMessage))
        self._counts = counts

    async def send(self, messages: Sequence[FromAgent]) -> None:
        self._counts["writes"] += 1
        for message in messages:
            self._counts[f"said {type(message).__name__}"] += 1
        await super().send(messages)

    async def receive(self) -> MasterMessage:
        message = await super().receive()
        self._counts[f"heard {type(message).__name__}"] += 1
        return message


class _IdleHost(VirtualWorkerHost):
    """Starts no workers."""

    async def start(self, setup: SetUpWorker) -> WorkerProcess:
        return await trio.sleep_forever()


class _Node:
    """One node: its socket, its agent, and its worker."""

    def __init__(self, name: str, directory: Path, world: World, pids: Callable[[], int], counts: Counter[str]) -> None:
        self._name = name
        self._socket = directory / f"{name}.sock"
        self._world = world
        self._pids = pids
        self._counts = counts
        self._scope = trio.CancelScope()
        self._host: VirtualWorkerHost | None = None
        self._pid = pids()

    async def run(self, tag: str, host: type[VirtualWorkerHost]) -> None:
        """Serve masters until the agent is told to stop, or the power is gone."""
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            await listener.bind(str(self._socket))
            listener.listen(4)
            listening = trio.SocketListener(listener)
            warm_s = time.monotonic() + self._world.delays.warm_up_s
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._host = host(
                        self._world,
                        Gate(),
                        nursery,
                        pids=self._pids,
                        clock=time.monotonic,
                        warm_up=lambda: warm_s - time.monotonic(),
                    )
                    agent = Agent(
                        tag=tag,
                        accept=partial(self._accept, listening),
                        workers=self._host,
                        hello=self._hello,
                        cache_dir=Path("/nowhere"),
                        relays=RelaySockets(),
                    )
                    await agent.run()
                    nursery.cancel_scope.cancel()
        self._socket.unlink(missing_ok=True)

    def lose_power(self) -> None:
        """It is gone, with its worker; its kernel closes its sockets."""
        if self._host is not None:
            self._host.end_all()
        self._socket.unlink(missing_ok=True)
        self._scope.cancel()

    async def _accept(self, listening: trio.SocketListener) -> MasterConnection:
        return _CountingChannel(await listening.accept(), self._counts)

    def _hello(self, generation: int, living: tuple[WorkerStarted, ...]) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            oobleck_version=__version__,
            python_version=platform.python_version(),
            node=self._name,
            pid=self._pid,
            generation=generation,
            workers=living,
            num_cores=8,
            memory_bytes=_MEMORY_BYTES,
            clock_s=time.monotonic(),
        )


async def _serve(arguments: argparse.Namespace, world: World) -> None:
    counts: Counter[str] = Counter()
    pids = count(1000)
    names = [f"node{index}" for index in range(arguments.nodes)]
    nodes = {name: _Node(name, arguments.directory, world, lambda: next(pids), counts) for name in names}
    async with trio.open_nursery() as nursery:
        for node in nodes.values():
            nursery.start_soon(node.run, arguments.tag, _IdleHost if arguments.idle else VirtualWorkerHost)
        await _obey(nodes, counts)
        nursery.cancel_scope.cancel()


async def _obey(nodes: Mapping[str, _Node], counts: Counter[str]) -> None:
    """Follow the commands of the input until its end."""
    unread = b""
    async with trio.lowlevel.FdStream(os.dup(0)) as commands:
        async for data in commands:
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                match line.decode().split():
                    case ["counts"]:
                        print(json.dumps(counts), flush=True)
                    case ["lose", name]:
                        nodes[name].lose_power()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--tag", required=True)
    parser.add_argument("--idle", action="store_true", help="start no workers")
    arguments = parser.parse_args()
    raise_descriptor_limit()
    profile = profile_from_json(arguments.profile.read_text(encoding="utf-8"))
    time_ = _RealTime()
    tempo = Tempo(profile, form_group_s=_DELAYS.form_group_s)
    world = World(kinds=NodeKinds.alike(profile), delays=_DELAYS, tempo=tempo, rng=Random(0), time=time_)
    trio.run(_serve, arguments, world, clock=time_)


if __name__ == "__main__":
    main()
