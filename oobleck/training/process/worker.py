"""The worker process: takes the agent's messages, follows orders on a training thread (`engine.py`), and reports.

The control thread answers fences at once, whatever the training thread is doing (`control/steps/commit_state.py`).
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import queue
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, assert_never

import torch

from oobleck.control import protocol
from oobleck.control.steps import CommitState, Interrupted, PeerLost
from oobleck.host.streams import shield_scripts
from oobleck.planner import WorkerId, profile_to_json
from oobleck.training import comm
from oobleck.training.assembly import assemble
from oobleck.training.checkpoint import LayerSaver
from oobleck.training.data import ShardScanner
from oobleck.training.likeness import things_of_worker
from oobleck.training.model import require_compiler, share_of
from oobleck.training.step import Engine
from oobleck.training.worker_log import WorkerLog, start_logging

from .errors import raised
from .link import AgentLink
from .profiler import device_name, profile_of_job

_EXIT_FAILED = 1
_STACK_LINES = 20
_LOOK_S = 0.02
"""How often to see whether the training thread has come on."""
_BUSY_SHARE = 0.1
"""A process that uses this share of a core computes."""


def run_worker(sock: socket.socket) -> None:
    """Be a worker until the agent ends it; never returns.

    An uncaught exception on any thread ends the process: the others would wait for that thread forever.
    """
    shield_scripts()
    faulthandler.enable()  # if native code ends the process, the agent's log has the calls that led there
    link = AgentLink(sock)
    threading.excepthook = lambda failed: _fail(link, failed.exc_value)
    try:
        setup = link.receive()
        assert isinstance(setup, protocol.SetUpWorker), setup
        os.environ["OOBLECK_NODE"] = setup.worker_id.node  # for what the job's script makes
        start_logging(setup.job.log_level)
        _Worker(link, setup).run()
    except BaseException as error:  # noqa: BLE001  a process main: the agent gets the traceback, whatever it was
        _fail(link, error)


def _fail(link: AgentLink, error: BaseException | None) -> NoReturn:
    """End the process, and tell the agent why, if there is memory left to do so.

    Threads that wait for lost peers cannot be joined, and destroying their groups would block.
    """
    try:
        failed = raised(error)
        link.send(protocol.WorkerFailed(end=failed))
        logging.getLogger(__name__).error("ends: %s\n%s", failed.message, failed.traceback)
    finally:
        os._exit(_EXIT_FAILED)


class _Worker:
    def __init__(self, link: AgentLink, setup: protocol.SetUpWorker) -> None:
        torch.set_num_threads(setup.torch_threads)
        job = setup.job
        self._link = link
        self._job = job
        self._worker_id = setup.worker_id
        self._device = setup.worker_id.device
        self._training_thread = threading.get_ident()
        self._computes_on = comm.choose_device(job.device, setup.local_device)
        comm.use_device(self._computes_on)
        self._waiter = comm.Waiter(self._computes_on)
        self._commit_state = CommitState(setup.worker_id, self._waiter.announce, lock=threading.Lock())
        self._log = WorkerLog(__name__, setup.worker_id, lambda: self._commit_state.generation)
        self._log.info("begins as process %d", os.getpid())
        self._links = comm.PeerLinks(setup.worker_id, setup.address, handle=self._hear, lost=self._note_lost)
        self._agreements = comm.PeerAgreements(setup.worker_id, self._waiter, self._links.send)
        if job.compile:
            require_compiler(self._computes_on)
        self._owns_device = setup.num_sharing == 1
        self._of_device = comm.device_memory_bytes(
            self._computes_on, num_sharing=setup.num_sharing, wanted_bytes=job.device_memory_bytes
        )
        self._memory_bytes = self._of_device or job.device_memory_bytes or setup.device_memory_bytes
        self._groups = comm.GroupTable(
            setup.worker_id,
            setup.address,
            self._links,
            self._waiter,
            degree=job.tensor_parallel,
            owns_device=self._owns_device,
        )
        self._measurements: queue.SimpleQueue[protocol.ProfileRequest | protocol.TimeLink | protocol.UseShare] = (
            queue.SimpleQueue()
        )
        assembly = assemble(job, cache_dir=Path(setup.cache_dir))
        self._dataset = assembly.train
        self._structure = assembly.structure
        self._optimizer = assembly.optimizer
        self._alike = things_of_worker(assembly)
        self._scanner: ShardScanner | None = None
        self._shards: tuple[str, ...] = ()
        self._records, shards = self._dataset.records, self._dataset.shards
        if self._records is not None and shards is not None:
            self._records.on_news(self._waiter.announce)
            self._scanner = ShardScanner(shards.survey, self._device, link.send)
            self._shards = shards.names
        self._saving: LayerSaver | None = None
        degree = job.tensor_parallel
        share = share_of(self._structure, rank=self._device % degree, degree=degree)
        if setup.storage is not None and job.checkpoint.enabled:
            self._saving = LayerSaver(
                setup.worker_id, setup.storage, share, link.send, tag=setup.job.tag, device=self._computes_on
            )
        self._engine = Engine(
            assembly,
            share,
            groups=self._groups,
            agreements=self._agreements,
            commit_state=self._commit_state,
            saving=self._saving,
            next_update=self._next_order,
            report=link.send,
        )

    def run(self) -> NoReturn:
        """Follow orders forever."""
        self._link.start_reader(self._handle)
        self._link.send(
            protocol.WorkerReady(
                device=self._device,
                pid=os.getpid(),
                data_digest=self._dataset.digest,
                alike=self._alike,
                num_samples=self._dataset.num_samples,
                layer_names=self._structure.layer_names,
                parameters=self._structure.num_parameters,
                torch_version=str(torch.__version__),
                device_name=device_name(self._computes_on),
                device_memory_bytes=self._of_device,
                address=self._links.address,
                saves=self._saving is not None,
                shards=self._shards,
            )
        )
        gc.freeze()
        self._log.info(
            "is ready on %s: %d threads, %d layers, %d samples",
            device_name(self._computes_on),
            torch.get_num_threads(),
            len(self._structure.layer_names),
            self._dataset.num_samples,
        )
        self._engine.run()

    def _handle(self, message: protocol.WorkerBound) -> None:
        """Take one message; runs on the control thread and never waits for the training thread."""
        match message:
            case protocol.AskActivity():
                self._tell_activity(message)
            case protocol.Fence() if message.probe_addresses:
                self._explain(message)
            case protocol.Fence():
                self._link.send(self._answer(message))
            case protocol.PlanOrder():
                self._log.info("receives an order of generation %d", message.generation)
                self._links.know(message.common.addresses)
                if (needed := self._commit_state.give_order(message)) is not None:
                    self._log.warning("has another plan than the one that the order changes: asks for all of it")
                    self._link.send(needed)
            case protocol.FinishStep():
                self._log.info("is to stop after the step in flight")
                self._commit_state.want_stop()
            case protocol.SaveState(step=step):
                self._log.debug("is to save after step %d", step)
                if self._saving is not None:
                    self._saving.want(message)
            case protocol.FindCheckpoints():
                self._log.debug("looks for checkpoints")
                if self._saving is not None:
                    self._saving.find(message)
            case protocol.ProfileRequest() | protocol.UseShare():  # threads are those of the thread that asks for them
                self._measurements.put(message)
                self._waiter.announce()
            case protocol.TimeLink(peer=peer):
                self._links.know([peer])
                self._measurements.put(message)
                self._waiter.announce()
            case protocol.ScanRequest():
                if self._scanner is not None:
                    self._scanner.ask(message)
            case protocol.StepRecords():
                if self._records is not None:
                    self._records.put(message)
            case protocol.RecordsOver(step=step):
                self._log.info("learns that no step comes after %d", step)
                if self._records is not None:
                    self._records.end(message)
            case protocol.SetUpWorker():
                raise AssertionError("a worker is set up once")
            case _:
                assert_never(message)

    def _hear(self, sender: WorkerId, message: protocol.PeerMessage) -> None:
        """Take what a peer says; runs on the thread of the links."""
        match message:
            case protocol.PartUp() | protocol.TotalDown():
                self._agreements.hear(sender, message)
            case protocol.GroupValue():
                self._log.debug("is told %s by %s", message.key, sender)
                self._groups.take(message)

    def _note_lost(self, worker_id: WorkerId) -> None:
        """A link has ended that was wanted; runs on the thread of the links."""
        self._log.info("has lost its link to %s", worker_id)
        self._agreements.note_lost(worker_id)

    def _answer(self, fence: protocol.Fence) -> protocol.Status:
        """Raise the fence, and log what it says."""
        status = self._commit_state.answer(fence)
        self._groups.abort_fenced(is_pipeline_stopped=self._commit_state.is_pipeline_stopped())
        self._links.forget(fence.lost)
        self._log.info(
            "is fenced by generation %d, without %s: has applied step %d, %s, %d microbatches done%s",
            fence.generation,
            ", ".join(fence.lost) or "nobody",
            status.applied,
            "holds no sums" if status.reduced is None else f"holds the sums of step {status.reduced}",
            status.microbatches_done,
            "; its part of the step is broken" if status.broken else "",
        )
        return status

    def _explain(self, fence: protocol.Fence) -> None:
        """Answer a fence that asks why no step is committed; that takes its time, so on a thread of its own."""
        asked_s, used_s, mark = time.monotonic(), time.process_time(), self._waiter.mark
        waits_for, stack = self._waiter.waits_for, _stack_of(self._training_thread)
        status = self._answer(fence)
        self._links.renew()  # before the answer: what the next plan is formed over is new at both ends
        self._log.warning("is held up; waits for %s", ", ".join(map(str, waits_for)) or "nobody")

        def has_come_on() -> bool:
            return self._waiter.has_come_on(mark) or self._commit_state.microbatches_done != status.microbatches_done

        def tell() -> None:
            others = [each for each in fence.probe_addresses if each.worker_id != self._worker_id]
            unreachable = comm.probe_all(others)
            while not waits_for and not has_come_on() and time.monotonic() < asked_s + fence.patience_s:
                time.sleep(_LOOK_S)
            is_busy = time.process_time() - used_s >= _BUSY_SHARE * (time.monotonic() - asked_s)
            comes_on = has_come_on() or (is_busy and not waits_for)  # one that waits may look again and again
            self._log.info("has %scome on since", "" if comes_on else "not ")
            found = replace(status, waits_for=waits_for, has_come_on=comes_on)
            self._link.send(replace(found, unreachable=unreachable, stack=stack))

        threading.Thread(target=tell, daemon=True, name="explain").start()

    def _tell_activity(self, asked: protocol.AskActivity) -> None:
        """Say what the training thread does, once it has come on or could have; on a thread of its own."""
        asked_s, mark, done = time.monotonic(), self._waiter.mark, self._commit_state.microbatches_done

        def has_come_on() -> bool:
            return self._waiter.has_come_on(mark) or self._commit_state.microbatches_done != done

        def tell() -> None:
            while not has_come_on() and time.monotonic() < asked_s + asked.patience_s:
                time.sleep(_LOOK_S)
            activity = protocol.Activity(
                device=self._device,
                inquiry=asked.inquiry,
                microbatches_done=self._commit_state.microbatches_done,
                waits_for=self._waiter.waits_for,
                has_come_on=has_come_on(),
            )
            self._log.info("is late; waits for %s", ", ".join(map(str, activity.waits_for)) or "nobody")
            self._link.send(activity)

        threading.Thread(target=tell, daemon=True, name="activity").start()

    def _next_order(self) -> protocol.PlanUpdate:
        while True:
            self._waiter.wait(lambda: self._commit_state.has_update or not self._measurements.empty(), lambda: False)
            if not self._measurements.empty():
                self._measure(self._measurements.get())
            if (update := self._commit_state.take_update()) is not None:
                return update

    def _measure(self, wanted: protocol.ProfileRequest | protocol.TimeLink | protocol.UseShare) -> None:
        match wanted:
            case protocol.UseShare(torch_threads=threads, device_memory_bytes=memory_bytes):
                self._log.info("has %d threads from now on: others share its machine", threads)
                torch.set_num_threads(threads)
                self._memory_bytes = self._of_device or self._job.device_memory_bytes or memory_bytes
            case protocol.ProfileRequest():
                self._profile()
            case protocol.TimeLink():
                self._time_link(wanted)
            case _:
                assert_never(wanted)

    def _time_link(self, wanted: protocol.TimeLink) -> None:
        """Time the link to a peer; of the two, the one that leads says what came of it."""
        peer, seconds, error = wanted.peer.worker_id, {}, ""
        try:
            seconds = comm.time_link(
                self._groups,
                self._worker_id,
                peer,
                leads=wanted.leads,
                timeout_s=wanted.timeout_s,
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
            self._link.send(protocol.LinkTimed(device=self._device, seconds=tuple(seconds.items()), error=error))

    def _profile(self) -> None:
        profile = profile_of_job(
            self._job,
            self._structure,
            self._optimizer,
            device_memory_bytes=self._memory_bytes,
            owns_device=self._owns_device,
        )
        self._log.info("has measured the model's layers")
        self._link.send(protocol.Profiled(device=self._device, profile_json=profile_to_json(profile)))


def _stack_of(thread: int) -> str:
    """Where a thread of this process is, the innermost call last."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)[-_STACK_LINES:]) if frame is not None else ""
