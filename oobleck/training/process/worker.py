"""The worker process: receives the agent's messages, follows orders on a training thread (`engine.py`), and reports.

The control thread answers fences at once, whatever the training thread is doing (`control/steps/commit_state.py`).
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import queue
import socket
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, assert_never

import torch

from oobleck.control import protocol, steps
from oobleck.control.steps import CommitState, Interrupted, PeerLost
from oobleck.errors import ConfigError, PeerError
from oobleck.host.streams import shield_scripts
from oobleck.job import JobSpec
from oobleck.job.secrets import Hiding
from oobleck.planner import WorkerId, profile_to_json
from oobleck.training import comm
from oobleck.training.assembly import assemble
from oobleck.training.checkpoint import LayerSaver
from oobleck.training.data import ShardScanner
from oobleck.training.forking import has_cuda_driver
from oobleck.training.likeness import things_of_worker
from oobleck.training.model import Share, require_compiler, share_for
from oobleck.training.step import Engine
from oobleck.training.worker_log import WorkerLog, start_logging
from oobleck.wire import FrameDecoder, encode_frame

from .errors import raised
from .profiler import device_name, profile_of_job
from .standing import Standing

_EXIT_FAILED = 1
_EXIT_AGENT_GONE = 75  # EX_TEMPFAIL: the worker did nothing wrong

_Measurement = protocol.ProfileRequest | protocol.TimeLink | protocol.UseShare

_plain_log = logging.getLogger(__name__)


def run_worker(sock: socket.socket) -> None:
    """Be a worker until the agent ends it; never returns."""
    shield_scripts()
    faulthandler.enable()  # if native code ends the process, the agent's log has the calls that led there
    link = _AgentLink(sock)
    # An uncaught exception on any thread ends the process: other threads would wait for that thread forever.
    threading.excepthook = lambda failed: _fail(link, failed.exc_value)
    try:
        setup = link.receive()
        assert isinstance(setup, protocol.SetUpWorker), setup
        os.environ["OOBLECK_NODE"] = setup.worker_id.node  # for what the job's script makes
        start_logging(setup.job.log_level, Hiding(setup.job, os.environ))
        _Worker(link, setup).run()
    except BaseException as error:  # noqa: BLE001  a process main: the agent gets the traceback, whatever it was
        _fail(link, error)


class _AgentLink:
    """Frames to and from the agent over an inherited socket, with blocking calls."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # the agent made it for trio
        self._socket = sock
        self._decoder: FrameDecoder[protocol.WorkerBound] = FrameDecoder(protocol.WorkerBound)
        self._writing = threading.Lock()  # frames of several threads must not mix
        self._arrived: deque[protocol.WorkerBound] = deque()

    def send(self, message: protocol.WorkerMessage) -> None:
        """Send a message from any thread; ends the process when the agent is gone."""
        frame = encode_frame(message)
        try:
            with self._writing:
                self._socket.sendall(frame)
        except OSError as error:
            _end_without_agent(f"the agent cannot be reached: {error}")

    def receive(self) -> protocol.WorkerBound:
        """Block for the next message; ends the process when the agent is gone or sends an invalid frame."""
        while not self._arrived:
            try:
                data = self._socket.recv(1 << 16)
                self._arrived.extend(self._decoder.feed(data))
            except (OSError, PeerError) as error:
                _end_without_agent(f"the agent's message is not valid: {error}")
            if not data:
                _end_without_agent("the agent is gone")
        return self._arrived.popleft()


def _end_without_agent(problem: str) -> NoReturn:
    _plain_log.error(problem)
    os._exit(_EXIT_AGENT_GONE)


def _fail(link: _AgentLink, error: BaseException | None) -> NoReturn:
    """End the process, and report the reason to the agent, if there is memory left to do so."""
    try:
        failed = raised(error)
        link.send(protocol.WorkerFailed(end=failed))
        _plain_log.error("ends: %s\n%s", failed.message, failed.traceback)
    finally:
        # Not sys.exit: threads that wait for lost peers cannot be joined, and destroying their groups would block.
        os._exit(_EXIT_FAILED)


class _Worker:
    def __init__(self, link: _AgentLink, setup: protocol.SetUpWorker) -> None:
        torch.set_num_threads(setup.torch_threads)
        job = setup.job
        self._link = link
        self._job = job
        self._worker_id = setup.worker_id
        if job.device == "cuda" and has_cuda_driver():  # from the process that this one was forked from
            raise ConfigError(
                "device: a package that transformers imports here initializes CUDA on import, so no forked process can "
                "use a GPU; `python -X importtime -c 'import transformers.generation'` lists what is imported"
            )
        self._device = comm.choose_device(job.device, setup.local_device, gpu_id=setup.gpu_id)
        comm.use_device(self._device)
        self._waiter = comm.Waiter(self._device)
        self._commit_state = CommitState(setup.worker_id, self._waiter.announce, lock=threading.Lock())
        self._log = WorkerLog(__name__, setup.worker_id, lambda: self._commit_state.generation)
        self._log.info("begins as process %d", os.getpid())
        self._links = comm.PeerLinks(setup.worker_id, setup.address, handle=self._hear, lost=self._note_lost)
        self._agreements = comm.PeerAgreements(setup.worker_id, self._waiter, self._links.send)
        if job.compile:
            require_compiler(self._device)
        self._owns_device = setup.num_sharing == 1
        self._device_memory_bytes = comm.device_memory_bytes(
            self._device, num_sharing=setup.num_sharing, wanted_bytes=job.device_memory_bytes
        )
        self._memory_bytes = self._device_memory_bytes or job.device_memory_bytes or setup.device_memory_bytes
        self._groups = comm.GroupTable(
            setup.worker_id,
            setup.address,
            self._links,
            self._waiter,
            degree=job.devices_per_stage,
            owns_device=self._owns_device,
        )
        self._standing = Standing(
            setup.worker_id,
            self._commit_state,
            self._waiter,
            self._groups,
            self._links,
            training_thread=threading.get_ident(),  # the thread that makes the worker also trains
            log=self._log,
            send=link.send,
        )
        self._measurements: queue.SimpleQueue[_Measurement] = queue.SimpleQueue()
        self._assembly = assembly = assemble(job, cache_dir=Path(setup.cache_dir))
        self._alike = things_of_worker(assembly)
        self._scanner: ShardScanner | None = None
        self._records, shards = assembly.train.records, assembly.train.shards
        if self._records is not None and shards is not None:
            self._records.on_news(self._waiter.announce)
            self._scanner = ShardScanner(shards.survey, setup.worker_id.device, link.send)
        self._consents = steps.ConsentBoard(lambda: self._commit_state.generation)
        self._saving: LayerSaver | None = None
        share = self._share(job)
        if setup.storage is not None and job.checkpoint.enabled:
            self._saving = LayerSaver(
                setup.worker_id, setup.storage, share, link.send, tag=job.tag, device=self._device
            )
        self._first_update: protocol.PlanUpdate | None = None
        """What the engine is made for, where the first plan says what devices share out."""
        self._engine = self._make_engine(job, share) if len(job.shardings) == 1 else None

    def run(self) -> NoReturn:
        threading.Thread(target=self._read, daemon=True, name="control").start()
        dataset, structure, name = self._assembly.train, self._assembly.structure, device_name(self._device)
        self._link.send(
            protocol.WorkerReady(
                device=self._worker_id.device,
                pid=os.getpid(),
                data_digest=dataset.digest,
                alike=self._alike,
                num_samples=dataset.num_samples,
                layer_names=structure.layer_names,
                parameters=structure.num_parameters,
                torch_version=str(torch.__version__),
                device_name=name,
                device_memory_bytes=self._device_memory_bytes,
                gpu_id=comm.gpu_id_of(self._device),
                address=self._links.address,
                saves=self._saving is not None,
                shards=() if self._scanner is None or dataset.shards is None else dataset.shards.names,
            )
        )
        gc.freeze()  # all objects so far stay for good: later collections need not visit them
        self._log.info(
            "is ready on %s: %d threads, %d layers, %d samples",
            name,
            torch.get_num_threads(),
            len(structure.layer_names),
            dataset.num_samples,
        )
        if self._engine is None:
            self._first_update = update = self._next_order()
            assert update.sharding is not None
            job = replace(self._job, sharding=update.sharding)
            self._log.info("shares out what the plan says: %s", update.sharding)
            share = self._share(job)
            if self._saving is not None:
                self._saving.share_as(share)
            self._engine = self._make_engine(job, share)
        self._engine.run()

    def _share(self, job: JobSpec) -> Share:
        return share_for(job, self._assembly.structure, rank=self._worker_id.device % job.devices_per_stage)

    def _make_engine(self, job: JobSpec, share: Share) -> Engine:
        return Engine(
            replace(self._assembly, job=job),
            share,
            groups=self._groups,
            agreements=self._agreements,
            commit_state=self._commit_state,
            consents=self._consents,
            saving=self._saving,
            next_update=self._next_order,
            report=self._link.send,
        )

    def _read(self) -> NoReturn:
        while True:
            self._handle(self._link.receive())

    def _handle(self, message: protocol.WorkerBound) -> None:
        # On the control thread, which never waits for the training thread.
        match message:
            case protocol.AskActivity():
                self._standing.report(message)
            case protocol.Fence():
                self._standing.answer(message)
            case protocol.PlanOrder():
                self._log.info("receives an order of generation %d", message.generation)
                self._links.know(message.common.addresses)  # first: the training thread uses them once it has the order
                if message.common.goes_back and self._saving is not None:
                    self._saving.go_back()
                if (needed := self._commit_state.give_order(message)) is not None:
                    self._log.warning("has another plan than the one that the order changes: asks for all of it")
                    self._link.send(needed)
            case protocol.FinishStep():
                self._log.info("stops after the step in flight")
                self._commit_state.want_stop()
            case protocol.SaveState(step=step):
                self._log.debug("saves after step %d", step)
                if self._saving is not None:
                    self._saving.want(message)
            case protocol.FindCheckpoints():
                self._log.debug("looks for checkpoints")
                if self._saving is not None:
                    self._saving.find(message)
            # For the training thread: `torch.set_num_threads` holds for the thread that calls it.
            case protocol.ProfileRequest() | protocol.UseShare() | protocol.TimeLink():
                if isinstance(message, protocol.TimeLink):
                    self._links.know([message.peer])
                self._measurements.put(message)
                self._waiter.announce()
            case protocol.ScanRequest():
                if self._scanner is not None:
                    self._scanner.ask(message)
            case protocol.StepRecords():
                if self._records is not None:
                    self._records.put(message)
            case protocol.StepsAllowed():
                self._consents.allow(message)
                self._waiter.announce()
            case protocol.StepsOver(step=step):
                self._log.info("learns that step %d is the last one", step)
                self._consents.end(message)
                if self._records is not None:
                    self._records.end(message)
                self._waiter.announce()
            case protocol.SetUpWorker():
                raise AssertionError("a worker is set up once")
            case _:
                assert_never(message)

    def _hear(self, sender: WorkerId, message: protocol.PeerMessage) -> None:
        # On the thread of the links.
        match message:
            case protocol.PartUp() | protocol.TotalDown():
                self._agreements.hear(sender, message)
            case protocol.GroupValue():
                self._log.debug("receives %s from %s", message.key, sender)
                self._groups.take(message)

    def _note_lost(self, worker_id: WorkerId) -> None:
        self._log.info("has lost its link to %s", worker_id)
        self._agreements.note_lost(worker_id)

    def _next_order(self) -> protocol.PlanUpdate:
        if (update := self._first_update) is not None:
            self._first_update = None
            return update
        while True:
            self._waiter.wait(lambda: self._commit_state.has_update or not self._measurements.empty(), lambda: False)
            if not self._measurements.empty():
                self._measure(self._measurements.get())
            if (update := self._commit_state.take_update()) is not None:
                return update

    def _measure(self, wanted: _Measurement) -> None:
        match wanted:
            case protocol.UseShare(torch_threads=threads, device_memory_bytes=memory_bytes):
                self._log.info("has %d threads from now on: others share its machine", threads)
                torch.set_num_threads(threads)
                self._memory_bytes = self._device_memory_bytes or self._job.device_memory_bytes or memory_bytes
            case protocol.ProfileRequest():
                profile = profile_of_job(
                    self._assembly, device_memory_bytes=self._memory_bytes, owns_device=self._owns_device
                )
                self._log.info("has measured the model's layers")
                self._link.send(protocol.Profiled(device=self._worker_id.device, profile_json=profile_to_json(profile)))
            case protocol.TimeLink():
                self._time_link(wanted)
            case _:
                assert_never(wanted)

    def _time_link(self, wanted: protocol.TimeLink) -> None:
        """Time the link to a peer; of the two, the one that leads reports the result."""
        peer, seconds, error = wanted.peer.worker_id, {}, ""
        try:
            seconds = comm.time_link(
                self._groups,
                self._worker_id,
                peer,
                leads=wanted.leads,
                timeout_s=wanted.timeout_s,
                # A plan never waits for a measurement.
                interrupted=lambda: self._commit_state.has_update,
            )
            self._log.info("has timed its link to %s", peer)
        except PeerLost as failure:
            error = str(failure)
        except Interrupted:
            error = "a plan came first"
        if error:
            self._log.warning("has not timed its link to %s: %s", peer, error)
        if wanted.leads:
            seconds_by_size = tuple(seconds.items())
            self._link.send(protocol.LinkTimed(device=self._worker_id.device, seconds=seconds_by_size, error=error))
