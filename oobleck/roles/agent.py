"""The agent: starts the workers of one node, passes messages between them and the master, and reports their ends.

It outlives its connection: without a master, training continues until a new one connects. After the orphan timeout the
agent ends its workers and itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import assert_never

import trio

from oobleck.control import protocol
from oobleck.errors import ConfigError, PeerError, WorkersUnavailable
from oobleck.job import ControlSpec
from oobleck.plan import WorkerId

from . import agent_ports
from .channel import CLOSED, close
from .checkpoint_persister import CheckpointPersister
from .rank_keeper import RankKeeper
from .resend_queue import ResendQueue
from .way import Way

_UNSAID_LIMIT = 100_000  # messages kept for a master that is away
_UNREAD_LIMIT = 10_000  # messages queued for a worker; one that reads none of them is stuck for good
# A worker's socket may stay open this long after its process ended, because a child process may hold it.
_WORKER_LAST_WORDS_S = 2.0
_GREETING_S = 10.0
_HEARTBEAT_POLL_S = 0.1  # how often to check for the master's heartbeat interval
_FIRST_CONTACT_S = 60.0  # how long a new agent waits for its master
_ASKS_AFTER = 0.25  # after this share of its patience without a message, an agent asks for answers to heartbeats
_USE_INTERVAL_S = 2.0
_LEAVE_S = 5.0  # how long the last messages to the master may take once the workers are asked to end


@dataclass(slots=True)
class _Worker:
    handle: agent_ports.WorkerHandle
    outgoing: trio.MemorySendChannel[protocol.WorkerBound]
    share: protocol.UseShare
    error: protocol.Raised | None = None
    """The exception that ends it, once it has reported that."""

    def started(self, device: int) -> protocol.WorkerStarted:
        return protocol.WorkerStarted(device=device, pid=self.handle.pid)


class Agent:
    """One node's agent. `run` returns when it was asked to stop, or when no master connected for too long."""

    def __init__(
        self,
        *,
        tag: str,
        accept: Callable[[], Awaitable[agent_ports.MasterConnection]],
        workers: agent_ports.WorkerHost | None = None,
        ranks: agent_ports.RankHost | None = None,
        hello: Callable[[int, tuple[protocol.WorkerStarted, ...]], protocol.Hello],
        cache_dir: Path,
        checkpoints: agent_ports.CheckpointStore | None = None,
        await_notice: Callable[[ControlSpec], Awaitable[str]] | None = None,
        relays: agent_ports.RelayNetwork | None = None,
        meter: agent_ports.UseMeter | None = None,
    ) -> None:
        """It has `workers`, which starts the workers of a job, or `ranks`, which starts the ranks of a script.

        Without `checkpoints`, it saves nothing on this node; without `relays`, it connects to no other agent.
        `meter` measures what the node uses.
        `await_notice` returns the notice's words when the node is about to be taken away.
        """
        self._await_notice = await_notice
        self._relays = relays
        self._meter = meter  # None once it is used, or where it is not
        self._checkpoints = checkpoints
        self._storage: protocol.StoragePaths | None = None
        self._tag = tag
        self._accept = accept
        self._host = workers
        self._hello = hello
        self._cache_dir = cache_dir
        self._control: ControlSpec | None = None
        self._gpu_ids: dict[int, str] = {}  # of the machine's devices, as its first workers found them
        self._configure: protocol.Configure | None = None  # stays None where there are ranks in place of workers
        self._workers: dict[int, _Worker] = {}
        self._starting: set[int] = set()
        self._worker_ended = trio.Event()
        self._generation = 0
        self._resend_queue = ResendQueue(limit=_UNSAID_LIMIT)
        self._next: agent_ports.MasterConnection | None = None
        self._has_master = trio.Event()
        self._heard_s = 0.0
        self._patience = trio.CancelScope()  # ends a conversation in which the master sends nothing
        self._listening = trio.CancelScope()  # ends once the master asks the agent to stop, directly or by a relay
        self._way: Way | None = None
        self._stop_reason: str | None = None
        queue = self._resend_queue
        self._ranks = None if ranks is None else RankKeeper(ranks, say=queue.add, show=queue.offer)
        self._persister = None if checkpoints is None else CheckpointPersister(checkpoints, queue.add)
        self._keepers = [keeper for keeper in (self._ranks, self._persister) if keeper is not None]

    async def run(self) -> str:
        """Serve masters, one after the other; returns why it ended."""
        async with trio.open_nursery() as nursery:
            if self._host is not None:
                nursery.start_soon(self._watch_fork_server, self._host)
            for keeper in self._keepers:
                nursery.start_soon(keeper.run)
            nursery.start_soon(self._meet_masters)
            while self._stop_reason is None:
                with trio.move_on_after(self._patience_s):
                    await self._has_master.wait()
                connection, self._next, self._has_master = self._next, None, trio.Event()
                if connection is None:
                    self._stop_reason = f"no master came for {self._patience_s:g} s"
                    await self._free_memory()
                    break
                await self._serve(connection, nursery)
            self._kill_all()
            nursery.cancel_scope.cancel()
        return self._stop_reason or "done"

    @property
    def _patience_s(self) -> float:
        """How long it continues without a message of a master."""
        return self._control.orphan_timeout_s if self._control else _FIRST_CONTACT_S

    # --- the conversation with a master ----------------------------------------------------------------------

    async def _meet_masters(self) -> None:
        """Take in masters that greet, and refuse others; of several that wait, serve the newest."""
        while True:
            connection = await self._accept()
            try:
                await self._receive_greeting(connection)
            except (trio.EndOfChannel, trio.BrokenResourceError, trio.TooSlowError, PeerError):
                await close(connection)
                continue
            if self._next is not None:
                await close(self._next)
            self._next = connection
            self._has_master.set()

    async def _give_way(self, talk: trio.CancelScope) -> None:
        """End a conversation once another master connects."""
        # A network that loses packets closes no connection: a master that was cut off comes back by a new one.
        await self._has_master.wait()
        talk.cancel()

    async def _serve(self, connection: agent_ports.MasterConnection, nursery: trio.Nursery) -> None:
        try:
            workers = tuple(worker.started(device) for device, worker in sorted(self._workers.items()))
            await connection.send([self._hello(self._generation, workers)])
            # The master before may have died with the reports of the last saves.
            reported = () if self._persister is None else self._persister.reports
            self._resend_queue.repeat_unheard(also=reported)
            async with trio.open_nursery() as talk:
                deliver = partial(self._take_in, nursery)
                self._way = way = Way(connection, self._resend_queue, talk, network=self._relays, deliver=deliver)
                talk.start_soon(way.speak, self._queue_heartbeat)
                talk.start_soon(self._give_way, talk.cancel_scope)
                # A master whose machine lost its power never closes the connection, but answers no heartbeats either.
                self._heard_s = trio.current_time()
                with trio.fail_after(self._patience_s) as self._patience, trio.CancelScope() as self._listening:
                    while self._stop_reason is None:
                        self._take_in(nursery, await connection.receive())
                with trio.move_on_after(_LEAVE_S):
                    await way.leave()
                    await self._take_leave()
                talk.cancel_scope.cancel()
        except* (*CLOSED, PeerError, trio.TooSlowError):
            pass  # the master is gone or broke the protocol; training continues, and another master may connect
        finally:
            self._way = None
            await close(connection)

    def _take_in(self, nursery: trio.Nursery, message: protocol.MasterMessage) -> None:
        """Take in a message of the master, sent directly or through others. Raises PeerError."""
        self._carry_out(message, nursery)
        self._heard_s = trio.current_time()
        self._patience.deadline = self._heard_s + self._patience_s

    async def _receive_greeting(self, connection: agent_ports.MasterConnection) -> None:
        with trio.fail_after(_GREETING_S):
            greeting = await connection.receive()
        if not isinstance(greeting, protocol.Greeting):
            raise PeerError(f"sent {type(greeting).__name__} before Greeting")
        if greeting.tag != self._tag:
            raise PeerError(f"asked for the job {greeting.tag}; this is {self._tag}")

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            worker.handle.kill()
        if self._ranks is not None:
            self._ranks.kill_all()

    async def _take_leave(self) -> None:
        """End the workers, and report it after all other messages; then nothing of this node is left."""
        self._kill_all()
        while self._workers or self._starting:
            await self._worker_ended.wait()
        if self._ranks is not None:
            await self._ranks.all_gone()
        for keeper in self._keepers:
            # A slow disk leaves half of the time to the last messages.
            with trio.move_on_after(_LEAVE_S / 2):
                await keeper.settle()
        await self._free_memory()
        self._resend_queue.add(protocol.AgentStopped(reason=self._stop_reason or ""))
        await self._resend_queue.all_said()

    async def _free_memory(self) -> None:
        for keeper in self._keepers:
            with trio.move_on_after(_LEAVE_S / 4):  # a store that does not answer leaves the rest as well
                await keeper.leave()

    def _queue_heartbeat(self) -> float:
        """Queue a heartbeat, and return when the next one is due."""
        now_s = trio.current_time()
        if self._control is None:
            return now_s + _HEARTBEAT_POLL_S
        self._resend_queue.beat(asks=now_s - self._heard_s >= _ASKS_AFTER * self._patience_s)
        return now_s + self._control.heartbeat_interval_s

    async def _watch_for_notice(
        self, await_notice: Callable[[ControlSpec], Awaitable[str]], control: ControlSpec
    ) -> None:
        self.request_leave(await await_notice(control))

    async def _watch_fork_server(self, host: agent_ports.WorkerHost) -> None:
        while True:
            self._resend_queue.add(await host.server_ended())

    def request_leave(self, reason: str) -> None:
        """Ask the master to drain this node."""
        self._resend_queue.add(protocol.Leaving(reason=reason))

    def _carry_out(self, message: protocol.MasterMessage, nursery: trio.Nursery) -> None:
        match message:
            case protocol.Configure():
                is_first, self._configure, self._control = self._configure is None, message, message.job.control
                if self._host is None:
                    raise PeerError("asked for workers; this agent runs a script")
                if is_first:  # the master repeats it where it may have been lost with a connection
                    self._open_storage(message)
                    nursery.start_soon(self._host.prepare, message.job, self._cache_dir)
                # Other nodes of the machine may have joined or left, which changes each worker's share.
                for device in self._workers:
                    self._give_share(device)
                self._watch_notice(message.job.control, nursery)
                self._watch_use(message, nursery)
            case protocol.ConfigureRanks():
                self._control = message.run.control
                self._watch_notice(message.run.control, nursery)
                self._watch_use(message, nursery)
                self._order_ranks(message)
            case _ if isinstance(message, protocol.RanksOrder):
                self._order_ranks(message)
            case protocol.Heartbeat(sequence=sequence):
                self._resend_queue.heard(sequence)
            case _ if isinstance(message, protocol.RelayOrder):
                if self._configure is None or self._way is None:
                    raise PeerError(f"{type(message).__name__} came before Configure")
                self._way.carry_out(message, self._configure)
            case protocol.Greeting():
                raise PeerError("a second greeting on one connection")
            case (
                protocol.CommitCheckpoint()
                | protocol.PersistState()
                | protocol.RemoveOld()
                | protocol.RemoveUnfinished()
            ):
                if self._persister is not None:
                    self._persister.take(message)
            case protocol.StartWorker(device=device):
                configure = self._duty_for(device)
                # A master that took over may repeat the request of the one before.
                if device not in self._workers and device not in self._starting:
                    self._starting.add(device)
                    nursery.start_soon(self._run_worker, device, configure)
            case protocol.KillWorker(device=device):
                if device in self._workers:
                    self._workers[device].handle.kill()
            case protocol.PlanOrder(device=device, generation=generation):
                self._generation = max(self._generation, generation)
                self._send_to_worker(device, message)
            case protocol.AskActivity(device=device):
                self._send_to_worker(device, message)
                if device in self._workers:
                    nursery.start_soon(self._watch_processor, self._workers[device], message)
            case protocol.ForWorker():
                self._send_to_worker(message.device, message)
            case protocol.StopAgent(reason=reason):
                self._stop_reason = reason
                self._listening.cancel()
            case _:
                assert_never(message)

    def _watch_notice(self, control: ControlSpec, nursery: trio.Nursery) -> None:
        if self._await_notice is not None:
            await_notice, self._await_notice = self._await_notice, None
            nursery.start_soon(self._watch_for_notice, await_notice, control)

    def _watch_use(self, order: protocol.Configure | protocol.ConfigureRanks, nursery: trio.Nursery) -> None:
        if self._meter is not None and order.reports_use:
            meter, self._meter = self._meter, None
            nursery.start_soon(self._report_use, meter)

    async def _report_use(self, meter: agent_ports.UseMeter) -> None:
        while True:
            await trio.sleep(_USE_INTERVAL_S)
            # A relay gathers the messages of thousands of nodes, whose use no one reads one by one.
            if self._way is None or not self._way.is_direct:
                continue
            pids = [worker.handle.pid for worker in self._workers.values()]
            pids += [] if self._ranks is None else self._ranks.pids
            use = await meter.measure(pids, [gpu_id for _, gpu_id in sorted(self._gpu_ids.items()) if gpu_id])
            if self._way is not None:
                self._resend_queue.add_in_passing(use)

    def _order_ranks(self, order: protocol.RanksOrder) -> None:
        if self._ranks is None:
            raise PeerError(f"sent {type(order).__name__}; this agent has workers, and runs no script")
        try:
            self._ranks.take(order)
        except trio.WouldBlock:
            raise PeerError("sends more orders for ranks than can be carried out") from None

    def _open_storage(self, configure: protocol.Configure) -> None:
        if self._checkpoints is None or not configure.job.checkpoint.enabled:
            return
        try:
            self._storage = self._checkpoints.open(configure.job.checkpoint, run=configure.run)
        except ConfigError as error:
            self._resend_queue.add(protocol.StateNotSaved(device=0, name="", step=0, reason=str(error)))

    # --- workers -----------------------------------------------------------------------------------------------

    def _send_to_worker(self, device: int, message: protocol.WorkerBound) -> None:
        """Queue a message for a worker, which `training/process/worker.py` handles."""
        worker = self._workers.get(device)
        if worker is None:
            return  # nothing matters to a worker that is gone
        try:
            worker.outgoing.send_nowait(message)
        except trio.WouldBlock:
            worker.handle.kill()  # it reads nothing any more

    def _give_share(self, device: int) -> None:
        """Tell a worker its share of the machine, if that has changed."""
        worker, share = self._workers[device], self._share
        if worker.share != share:
            worker.share = share
            self._send_to_worker(device, share)

    def _duty_for(self, device: int) -> protocol.Configure:
        """What a worker of this device is to do. Raises PeerError where there can be none."""
        configure = self._configure
        if configure is None:
            raise PeerError("StartWorker came before Configure")
        if device not in range(len(configure.devices)):
            raise PeerError(f"asked for a worker on device {device}; there are {len(configure.devices)}")
        return configure

    @property
    def _share(self) -> protocol.UseShare:
        """What each worker may use of the machine, by the newest `Configure`."""
        configure = self._configure
        assert configure is not None
        return protocol.UseShare(
            torch_threads=configure.torch_threads, device_memory_bytes=configure.device_memory_bytes
        )

    async def _run_worker(self, device: int, configure: protocol.Configure) -> None:
        """Start a worker, pass on its messages, and report its end."""
        assert self._host is not None
        share = self._share
        setup = protocol.SetUpWorker(
            job=configure.job,
            worker_id=WorkerId(node=configure.node, device=device),
            address=configure.address,
            torch_threads=share.torch_threads,
            cache_dir=str(self._cache_dir),
            device_memory_bytes=share.device_memory_bytes,
            local_device=configure.devices[device],
            gpu_id=self._gpu_ids.get(configure.devices[device], ""),
            num_sharing=configure.num_sharing,
            storage=self._storage,
        )
        try:
            handle = await self._host.start(setup)
        except WorkersUnavailable as error:
            self._starting.remove(device)
            self._resend_queue.add(protocol.AgentStopped(reason=str(error), is_failure=True))
            return
        outgoing, queue = trio.open_memory_channel[protocol.WorkerBound](_UNREAD_LIMIT)
        worker = self._workers[device] = _Worker(handle, outgoing, share)
        self._give_share(device)  # it may have changed while the worker was started
        self._starting.remove(device)
        if self._stop_reason is not None:  # `_kill_all` did not know of it
            handle.kill()
        self._resend_queue.add(worker.started(device))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_to_worker, worker, queue)
            with trio.CancelScope() as listening:
                nursery.start_soon(self._end_listening, worker, listening)
                await self._listen_to_worker(worker, setup.local_device)
            handle.kill()  # its socket is closed, or it broke the protocol, and it would train on unheard
            end = await handle.wait()
            nursery.cancel_scope.cancel()
        del self._workers[device]
        self._resend_queue.add(protocol.WorkerExited(device=device, pid=handle.pid, end=worker.error or end))
        self._worker_ended.set()
        self._worker_ended = trio.Event()

    async def _watch_processor(self, worker: _Worker, asked: protocol.AskActivity) -> None:
        """Report how much processor time a worker's process uses until its patience is over."""
        began_s, before_s = trio.current_time(), worker.handle.processor_s()
        await trio.sleep(asked.patience_s)
        used_s, within_s = worker.handle.processor_s() - before_s, trio.current_time() - began_s
        # Another worker may have taken its place, about which the master has asked nothing.
        if self._workers.get(asked.device) is worker:
            use = protocol.ProcessorUse(device=asked.device, inquiry=asked.inquiry, used_s=used_s, within_s=within_s)
            self._resend_queue.add(use)

    async def _end_listening(self, worker: _Worker, listening: trio.CancelScope) -> None:
        await worker.handle.wait()
        await trio.sleep(_WORKER_LAST_WORDS_S)
        listening.cancel()

    async def _write_to_worker(self, worker: _Worker, queue: trio.MemoryReceiveChannel[protocol.WorkerBound]) -> None:
        try:
            async for message in queue:
                await worker.handle.send([message])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the worker is gone; the task that waits for it reports its exit

    async def _listen_to_worker(self, worker: _Worker, local_device: int) -> None:
        """Pass on a worker's messages until its socket closes."""
        while True:
            try:
                message = await worker.handle.receive()
            except (*CLOSED, PeerError):
                return
            match message:
                case protocol.WorkerFailed(end=error):
                    worker.error = error
                case protocol.Pace():
                    self._resend_queue.add_in_passing(message)
                case _:
                    self._resend_queue.add(message)
                    if isinstance(message, protocol.WorkerReady):
                        self._gpu_ids.setdefault(local_device, message.gpu_id)
                    if self._persister is not None and isinstance(message, protocol.StateSaved):
                        self._persister.take(message)
                    elif self._persister is not None and isinstance(message, protocol.StateNotSaved):
                        self._persister.note(message)
