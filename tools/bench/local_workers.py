"""Real worker processes without a cluster around them: this process plays their agents and their master.

What a worker is told and tells is the same as in a run of `oobleck up`; its groups are formed in the same way.
Left out are SSH, the agents and the coordinator, none of which has a part in an undisturbed step.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path

from oobleck.control.plans import orders_of
from oobleck.control.protocol import (
    CommitRecord,
    Finished,
    PlanUpdate,
    Profiled,
    ProfileRequest,
    SetUpWorker,
    StepCommitted,
    WorkerAddress,
    WorkerBound,
    WorkerFailed,
    WorkerMessage,
    WorkerReady,
)
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, Profile, WorkerId, profile_from_json
from oobleck.planner.profiles import typical_profile
from oobleck.schedule import ScheduleKind
from oobleck.wire import FrameDecoder, encode_frame

__all__ = ["Forking", "LocalWorkers", "Trained", "fork_context"]

Forking = ForkContext | ForkServerContext

_TIMEOUT_S = 200.0
_PRELOADED = ["oobleck.training.process.worker", "torch.distributed.pipelining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a run of workers reported."""

    records: tuple[CommitRecord, ...]
    """One a step."""
    finished: Mapping[WorkerId, Finished]


def fork_context() -> Forking:
    """Return a way to start processes that have torch imported already."""
    # Without other threads, as where a test has forked it, this process can be their server itself.
    if "torch" in sys.modules and len(os.listdir("/proc/self/task")) == 1:
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class LocalWorkers:
    """Workers of named nodes, one device each unless told otherwise. A context manager: they end with it.

    Where the job's device is a GPU, they share the first.
    """

    def __init__(
        self,
        job: JobSpec,
        worker_ids: tuple[WorkerId, ...],
        *,
        context: Forking,
        cache_dir: Path,
        threads: int,
        beside: Callable[[WorkerId], None] | None = None,
    ) -> None:
        """`beside` is called in each worker's process before it begins."""
        self._worker_ids = worker_ids
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[WorkerId, socket.socket] = {}
        self._processes = []
        for worker_id in worker_ids:
            ours, theirs = socket.socketpair()
            process = context.Process(target=_work, args=(theirs, worker_id, beside), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._sockets[worker_id] = ours
            self._selector.register(ours, selectors.EVENT_READ, (worker_id, FrameDecoder(WorkerMessage)))
            setup = SetUpWorker(
                job=job,
                worker_id=worker_id,
                address="127.0.0.1",
                torch_threads=threads,
                cache_dir=str(cache_dir),
                device_memory_bytes=job.device_memory_bytes or 4 << 30,
                num_sharing=len(worker_ids),
            )
            self._tell(worker_id, setup)
        self._addresses: dict[WorkerId, WorkerAddress] = {}
        try:
            while self._addresses.keys() != set(worker_ids):
                for worker_id, message in self._hear():
                    if isinstance(message, WorkerReady):
                        assert message.address is not None
                        self._addresses[worker_id] = message.address
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for sock in self._sockets.values():
            sock.close()
        self._selector.close()

    def profile(self) -> Profile:
        """Have all workers measure the model's layers at the same time, as in a run."""
        for worker_id in self._worker_ids:
            self._tell(worker_id, ProfileRequest(device=worker_id.device))
        profiles: dict[WorkerId, Profile] = {}
        while len(profiles) < len(self._worker_ids):
            for worker_id, message in self._hear():
                if isinstance(message, Profiled):
                    profiles[worker_id] = profile_from_json(message.profile_json, source="measured profile")
        return typical_profile(list(profiles.values()))

    def train(self, plan: ExecutionPlan, kind: ScheduleKind, *, num_sections: int = 1) -> Trained:
        """Train from the initial values to the job's last step; each step is cut into so many sections."""
        update = PlanUpdate(
            generation=1,
            plan=plan,
            pipeline_generations=(1,) * len(plan.pipelines),
            schedules=(kind,) * len(plan.pipelines),
            boundary=0,
            num_sections=num_sections,
            initial=True,
        )
        addresses = [(0, address) for address in self._addresses.values()]
        orders = orders_of(update, self._worker_ids, bases={}, known={}, in_force=None, addresses=addresses)
        for worker_id, order in orders:
            self._tell(worker_id, order)
        records: dict[int, CommitRecord] = {}
        finished: dict[WorkerId, Finished] = {}
        while finished.keys() != set(plan.worker_ids):
            for worker_id, message in self._hear():
                match message:
                    case StepCommitted(record=record):
                        records[record.step] = record
                    case Finished():
                        finished[worker_id] = message
                    case _:
                        pass
        return Trained(records=tuple(record for _, record in sorted(records.items())), finished=finished)

    def _hear(self) -> list[tuple[WorkerId, WorkerMessage]]:
        """Wait for words of any worker."""
        heard: list[tuple[WorkerId, WorkerMessage]] = []
        events = self._selector.select(_TIMEOUT_S)
        if not events:
            raise RuntimeError(f"no worker said anything for {_TIMEOUT_S:g} s")
        for key, _ in events:
            worker_id, decoder = key.data
            data = self._sockets[worker_id].recv(1 << 16)
            if not data:
                raise RuntimeError(f"the worker of {worker_id} is gone")
            for message in decoder.feed(data):
                if isinstance(message, WorkerFailed):
                    raise RuntimeError(message.end.traceback)  # noqa: TRY004
                heard.append((worker_id, message))
        return heard

    def _tell(self, worker_id: WorkerId, message: WorkerBound) -> None:
        self._sockets[worker_id].sendall(encode_frame(message))


def _work(sock: socket.socket, worker_id: WorkerId, beside: Callable[[WorkerId], None] | None) -> None:
    from oobleck.training.process import run_worker  # with torch, which the process that starts workers needs not

    if beside is not None:
        beside(worker_id)
    run_worker(sock)
