"""In-memory ports under virtual time: links with the real codec, workers that a test speaks for, a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio
import trio.testing

from oobleck import __version__
from oobleck.control.protocol import (
    PROTOCOL_VERSION,
    Configure,
    ForkServerEnded,
    FromAgent,
    Greeting,
    Hello,
    Killed,
    MasterMessage,
    ProcessEnd,
    SetUpWorker,
    Unseen,
    WorkerBound,
    WorkerMessage,
    WorkerStarted,
)
from oobleck.job import ControlSpec, JobSpec
from oobleck.roles.agent import Agent
from oobleck.roles.channel import MessageChannel
from oobleck.wire import FrameDecoder, encode_frame

__all__ = ["TAG", "AgentLink", "VirtualHost", "VirtualWorker", "agent_hello", "configure", "make_agent"]

TAG = "virtual"
CONTROL = ControlSpec(heartbeat_interval_s=0.5, lease_s=3.0, start_timeout_s=60.0, orphan_timeout_s=30.0)
JOB = JobSpec(tag=TAG, control=CONTROL, max_steps=2, global_batch_size=4, microbatch_size=1)


class AgentEnd(MessageChannel[MasterMessage, FromAgent]):
    """The master's end of a link to an agent."""

    address = "10.0.0.9"
    takes_calls = True

    def rest(self, is_resting: bool) -> None:
        """An idle link costs nothing here."""


class AgentLink:
    """A tunnel between a master and an agent: two memory streams, cut or blocked at will."""

    def __init__(self) -> None:
        self.master_stream, self.agent_stream = trio.testing.memory_stream_pair()
        self.master = AgentEnd(self.master_stream, FrameDecoder(FromAgent))
        self.agent: MessageChannel[FromAgent, MasterMessage] = MessageChannel(
            self.agent_stream, FrameDecoder(MasterMessage)
        )

    def cut(self) -> None:
        """Both ends see the connection end at once."""
        self.master_stream.send_stream.close()
        self.agent_stream.send_stream.close()


class VirtualWorker:
    """A worker process that a test speaks for; see `oobleck.roles.agent_ports.WorkerHandle`."""

    def __init__(self, setup: SetUpWorker, pid: int) -> None:
        self.setup = setup
        self.pid = pid
        self.told: list[WorkerBound] = []
        self.reads = True
        self.is_killed = False
        self.computes = False
        """Its process uses one core."""
        self._say, self._said = trio.open_memory_channel[WorkerMessage | Exception](1000)
        self._ended = trio.Event()
        self._end: ProcessEnd = Unseen()
        self._heard = trio.Condition()

    async def send(self, messages: Sequence[WorkerBound]) -> None:
        if not self.reads:
            await trio.sleep_forever()
        if self._ended.is_set():
            raise trio.BrokenResourceError
        self.told += messages
        async with self._heard:
            self._heard.notify_all()

    async def receive(self) -> WorkerMessage:
        said = await self._said.receive()
        if isinstance(said, Exception):
            raise said
        return said

    async def wait(self) -> ProcessEnd:
        await self._ended.wait()
        return self._end

    def processor_s(self) -> float:
        return trio.current_time() if self.computes else 0.0

    def kill(self) -> None:
        if not self._ended.is_set():
            self.is_killed = True
            self.end(Killed(signal=9))

    # --- what the test does --------------------------------------------------------------------------------

    def say(self, *messages: WorkerMessage | Exception) -> None:
        for message in messages:
            self._say.send_nowait(message)

    def end(self, how: ProcessEnd, *, closes_socket: bool = True) -> None:
        """The process ends; a child of its own may hold its socket open."""
        self._end = how
        self._ended.set()
        if closes_socket:
            self._say.close()

    async def hears(self, kind: type) -> WorkerBound:
        """Wait until it was told something of a kind."""
        async with self._heard:
            while not (found := [message for message in self.told if isinstance(message, kind)]):
                await self._heard.wait()
        return found[-1]


class VirtualHost:
    """Starts virtual workers."""

    def __init__(self) -> None:
        self.workers: list[VirtualWorker] = []
        self.prepared: list[Path] = []
        self.start_s = 0.0
        self._started = trio.Condition()
        self.end_server, self._server_ends = trio.open_memory_channel[ForkServerEnded](1)

    async def server_ended(self) -> ForkServerEnded:
        return await self._server_ends.receive()

    async def prepare(self, job: JobSpec, cache_dir: Path) -> None:
        self.prepared.append(cache_dir)

    async def start(self, setup: SetUpWorker) -> VirtualWorker:
        await trio.sleep(self.start_s)
        worker = VirtualWorker(setup, pid=100 + len(self.workers))
        self.workers.append(worker)
        async with self._started:
            self._started.notify_all()
        return worker

    async def worker(self, device: int = 0) -> VirtualWorker:
        """Wait for the worker of a device; the newest, where it was started again."""
        async with self._started:
            while not (found := [worker for worker in self.workers if worker.setup.worker_id.device == device]):
                await self._started.wait()
        return found[-1]


def agent_hello(generation: int = 0, workers: tuple[WorkerStarted, ...] = (), node: str = "n0") -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        oobleck_version=__version__,
        python_version="3.11.0",
        node=node,
        pid=1,
        generation=generation,
        workers=workers,
        num_cores=4,
        memory_bytes=1 << 30,
        clock_s=trio.current_time(),
    )


def configure(node: str = "n0", devices: tuple[int, ...] = (0,), job: JobSpec = JOB) -> Configure:
    return Configure(
        protocol=PROTOCOL_VERSION,
        oobleck_version=__version__,
        run="run",
        job=job,
        node=node,
        devices=devices,
        address="10.0.0.9",
        torch_threads=1,
        device_memory_bytes=1 << 30,
    )


def make_agent(accept: Callable, host: VirtualHost, node: str = "n0", tag: str = TAG, **ports: Any) -> Agent:
    return Agent(
        tag=tag,
        accept=accept,
        workers=host,
        hello=lambda generation, workers: agent_hello(generation, workers, node),
        cache_dir=Path("/cache"),
        **ports,
    )


async def send_raw(link: AgentLink, *messages: object) -> None:
    """Say whatever one likes at the master's end."""
    await link.master_stream.send_all(b"".join(map(encode_frame, messages)))


GREETING = Greeting(protocol=PROTOCOL_VERSION, tag=TAG)
