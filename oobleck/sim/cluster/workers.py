"""Virtual worker processes, and the host that starts them: the twin of `runtime.agent.workers`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import trio

from oobleck.control import protocol
from oobleck.job import JobSpec
from oobleck.planner import WorkerId, profile_to_json
from oobleck.planner.profiles import LINKS

from .gate import Gate
from .ports import WorkerPorts
from .worker import VirtualWorker
from .world import World

_KILLED = protocol.Killed(signal=9)
_TIMED_BYTES = (1 << 10, 1 << 20)


class WorkerProcess:
    """A worker process, as its agent and the world see it; `run` is its life, behind the gate of its node."""

    def __init__(
        self, setup: protocol.SetUpWorker, pid: int, world: World, gate: Gate, clock: Callable[[], float]
    ) -> None:
        self.pid = pid
        self.worker_id = setup.worker_id
        self.local_device = setup.local_device
        self._setup = setup
        self._world = world
        self._gate = gate
        self._clock = clock
        self._worker: VirtualWorker | None = None
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._woken = trio.lowlevel.ParkingLot()
        self._alarm_s = 0.0
        self._worked_s = 0.0  # busy seconds of the training thread up to its newest move
        self._works_since_s = math.inf
        self._unread: list[protocol.WorkerBound] = []  # while the process is frozen, or not set up yet
        # Messages of other workers in flight: (arrival, source, message).
        self._letters: list[tuple[float, WorkerId, protocol.CommitMessage]] = []
        self._profiling = trio.Event()
        self._outbox, self._sent = trio.open_memory_channel[protocol.WorkerMessage](math.inf)

    async def send(self, messages: Sequence[protocol.WorkerBound]) -> None:
        await trio.lowlevel.checkpoint()
        if self._ended.is_set():
            raise trio.BrokenResourceError(f"worker {self.pid} is gone")
        self._unread += messages
        self._read()

    async def receive(self) -> protocol.WorkerMessage:
        message = await self._sent.receive()
        await self._gate.passed()
        return message

    async def wait(self) -> protocol.ProcessEnd:
        await self._ended.wait()
        await self._gate.passed()
        return _KILLED

    def kill(self) -> None:
        """End the process at once; the agent can still receive its earlier messages."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._scope.cancel()
        self._outbox.close()
        if self._worker is not None:
            self._world.fabric.end(self.worker_id, self._world.fabric.newest)
            del self._world.peers[self.worker_id]

    def processor_s(self) -> float:
        return self._worked_s + max(0.0, self._world.time.now_s - self._works_since_s)

    def wake(self) -> None:
        """Let the process read its messages and check its wait again, after a freeze or a thaw."""
        if not self._ended.is_set():
            self._read()
            self._unpark()

    def _unpark(self) -> None:
        self._woken.unpark_all()

    async def run(self) -> None:
        """Get ready, then follow plan updates until the end."""
        with self._scope:
            await self._work(self._world.delays.set_up_worker_s)
            ports = WorkerPorts(
                fabric=self._world.fabric,
                carry=self._carry,
                tempo=self._world.tempo,
                clock=self._clock,
                say=self._outbox.send_nowait,
                announce=self._unpark,
            )
            worker = self._worker = VirtualWorker(self.worker_id, self._setup.job, ports)
            self._world.fabric.watch(self.worker_id, self._unpark)
            self._world.peers[self.worker_id] = self._expect
            self._outbox.send_nowait(self._ready(worker.address))
            self._read()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._profile)
                await self._train(worker)

    def _ready(self, address: protocol.WorkerAddress) -> protocol.WorkerReady:
        profile = self._world.kinds.profile_of(self.worker_id.node)
        return protocol.WorkerReady(
            device=self.worker_id.device,
            pid=self.pid,
            data_digest="virtual",
            num_samples=1 << 20,
            layer_names=tuple(layer.name for layer in profile.layers),
            parameters=sum(layer.param_bytes for layer in profile.layers) // 4,
            torch_version="virtual",
            shards=self._setup.job.data.shards,
            address=address,
        )

    def _read(self) -> None:
        if self._worker is None or self._gate.is_closed:
            return
        # A real worker's control thread reads whatever the training thread is doing.
        messages, self._unread = self._unread, []
        for message in messages:
            match message:
                case protocol.ProfileRequest():
                    self._profiling.set()
                case protocol.TimeLink(peer=peer) if message.leads:
                    self._time_link(peer.worker_id)
                case protocol.TimeLink():
                    pass  # the other worker reports
                case _:
                    self._worker.take(message)

    def _carry(self, target: WorkerId, message: protocol.CommitMessage) -> None:
        if target in self._world.peers:
            self._world.peers[target](self.worker_id, message)

    def _expect(self, source: WorkerId, message: protocol.CommitMessage) -> None:
        arrives_s = self._world.time.now_s + self._world.tempo.latency_s(source, self.worker_id)
        self._letters.append((arrives_s, source, message))
        self._world.time.call_at(arrives_s, self._unpark)

    def _hear(self, worker: VirtualWorker) -> None:
        """Handle arrived messages of other workers."""
        letters, self._letters = self._letters, []
        for letter in letters:
            arrives_s, source, message = letter
            if arrives_s <= self._world.time.now_s and self._world.fabric.is_whole((source, self.worker_id)):
                worker.hear(source, message)
            else:
                # A partition delays messages until it ends.
                self._letters.append(letter)

    def _time_link(self, peer: WorkerId) -> None:
        """Report the profile's times for a link, or nothing across a partition."""
        if self._world.fabric.is_whole((self.worker_id, peer)):
            link = self._world.kinds.profile.network.speed_of(LINKS[peer.node == self.worker_id.node])
            seconds = tuple((size, link.message_s(size)) for size in _TIMED_BYTES)
            self._outbox.send_nowait(protocol.LinkTimed(device=self.worker_id.device, seconds=seconds))

    async def _profile(self) -> None:
        await self._profiling.wait()
        await self._work(self._world.delays.profile_s)
        profile_json = profile_to_json(self._world.kinds.profile_of(self.worker_id.node))
        self._outbox.send_nowait(protocol.Profiled(device=self.worker_id.device, profile_json=profile_json))

    async def _work(self, seconds: float) -> None:
        due_s = self._world.time.now_s + seconds
        while self._world.time.now_s < due_s:
            await self._pause_until(due_s)
            # A frozen process makes no progress.
            due_s += await self._frozen()

    async def _frozen(self) -> float:
        """Wait while the process is frozen, and return the seconds of it."""
        began_s = self._world.time.now_s
        await self._gate.passed()
        return self._world.time.now_s - began_s

    async def _pause_until(self, due_s: float) -> None:
        # Calls of the clock cannot be cancelled, so each moment gets only one.
        if due_s not in (math.inf, self._alarm_s):
            self._alarm_s = due_s
            self._world.time.call_at(due_s, self._unpark)
        await self._woken.park()

    async def _train(self, worker: VirtualWorker) -> None:
        """Step the training thread as its waits end, are interrupted, or fail."""
        wait, due_s = worker.wait, math.inf
        while True:
            # Time in which the process was frozen does not count as work.
            due_s += await self._frozen()
            self._hear(worker)
            is_ready = wait.ready()
            if is_ready and due_s == math.inf:
                self._works_since_s = self._world.time.now_s
                due_s = self._works_since_s + wait.takes_s
            if not is_ready and wait.interrupted():
                worker.step()
            # Data and the error of a lost peer race: either may come first.
            elif wait.can_fail() and (not is_ready or self._world.rng.random() < 0.5):
                # Neighbours notice a peer's end at different moments.
                await self._pause_until(self._world.time.now_s + self._world.up_to(self._world.delays.notice_s))
                # A fence or a freeze during this pause comes first.
                if wait.interrupted() or self._gate.is_closed:
                    continue
                worker.fail()
            elif is_ready and due_s <= self._world.time.now_s:
                worker.step()
            else:
                await self._pause_until(due_s if is_ready else math.inf)
                continue
            wait, due_s = worker.wait, math.inf
            self._worked_s, self._works_since_s = self.processor_s(), math.inf
            # An open gate is no checkpoint: without this one, waits that are ready would keep other tasks from running.
            await trio.lowlevel.checkpoint()


@dataclass(eq=False)
class VirtualWorkerHost:
    world: World
    gate: Gate
    nursery: trio.Nursery
    _: KW_ONLY
    pids: Callable[[], int]
    """Returns a new process id."""
    clock: Callable[[], float]
    warm_up: Callable[[], float]
    """Returns the seconds until the node can fork workers."""
    processes: list[WorkerProcess] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._send_end, self._server_ends = trio.open_memory_channel[protocol.ForkServerEnded](math.inf)

    async def server_ended(self) -> protocol.ForkServerEnded:
        end = await self._server_ends.receive()
        await self.gate.passed()
        return end

    def end_server(self) -> None:
        """End the fork server: living workers stay, new ones wait for the next server."""
        self._send_end.send_nowait(protocol.ForkServerEnded(end=_KILLED, is_restarted=True))

    async def prepare(self, job: JobSpec, cache_dir: Path) -> None:
        await trio.lowlevel.checkpoint()

    async def start(self, setup: protocol.SetUpWorker) -> WorkerProcess:
        while (wait_s := self.warm_up()) > 0:  # noqa: ASYNC110  the server may end during the wait
            await trio.sleep(wait_s)
        await trio.sleep(self.world.delays.start_worker_s)
        await self.gate.passed()
        process = WorkerProcess(setup, self.pids(), self.world, self.gate, self.clock)
        self.processes.append(process)
        self.nursery.start_soon(process.run)
        return process

    def crash(self, device: int) -> None:
        """End the workers of one of the machine's devices."""
        for process in self.processes:
            if process.local_device == device:
                process.kill()

    def wake(self) -> None:
        """Let all processes see that the node was frozen or thawed."""
        for process in self.processes:
            process.wake()

    def end_all(self) -> None:
        for process in self.processes:
            process.kill()
