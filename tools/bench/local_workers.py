"""Real worker processes without a cluster around them: this process plays their agents and their master.

What a worker is told and tells is the same as in a run of `oobleck up`; the groups' keys go through its socket in the
same way. Left out are SSH, the agents and the coordinator, none of which has a part in an undisturbed step.
"""

from __future__ import annotations

import multiprocessing
import selectors
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, Place, Profile, profile_from_json
from oobleck.schedule import ScheduleKind
from oobleck.training.process import run_worker
from oobleck.wire import (
    CommitRecord,
    Finished,
    FrameDecoder,
    Order,
    Profiled,
    ProfileRequest,
    SetUpWorker,
    StepCommitted,
    StoreKeys,
    StorePut,
    WorkerBound,
    WorkerFailed,
    WorkerMessage,
    WorkerReady,
    encode_frame,
)

__all__ = ["LocalWorkers", "Trained", "fork_context"]

_TIMEOUT_S = 200.0
_PRELOADED = ["oobleck.training.process.worker", "torch.distributed.pipelining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a run of workers reported."""

    records: tuple[CommitRecord, ...]
    """One a step."""
    finished: Mapping[Place, Finished]


def fork_context() -> ForkServerContext:
    """Return a way to start processes that have torch imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class LocalWorkers:
    """Workers of named nodes, one device each unless told otherwise. A context manager: they end with it."""

    def __init__(
        self, job: JobSpec, places: tuple[Place, ...], *, context: ForkServerContext, cache_dir: Path, threads: int
    ) -> None:
        self._places = places
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[Place, socket.socket] = {}
        self._processes = []
        for place in places:
            ours, theirs = socket.socketpair()
            process = context.Process(target=run_worker, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._sockets[place] = ours
            self._selector.register(ours, selectors.EVENT_READ, (place, FrameDecoder(WorkerMessage)))
            setup = SetUpWorker(
                job=job,
                place=place,
                address="127.0.0.1",
                torch_threads=threads,
                cache_dir=str(cache_dir),
                device_memory_bytes=job.device_memory_bytes or 4 << 30,
            )
            self._tell(place, setup)
        ready: set[Place] = set()
        while ready != set(places):
            ready.update(place for place, message in self._hear() if isinstance(message, WorkerReady))

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
        """Have the first worker measure the model's layers while the others wait."""
        self._tell(self._places[0], ProfileRequest(device=self._places[0].device))
        while True:
            for _, message in self._hear():
                if isinstance(message, Profiled):
                    return profile_from_json(message.profile_json, source="measured profile")

    def train(self, plan: ExecutionPlan, kind: ScheduleKind, *, num_sections: int = 1) -> Trained:
        """Train from the initial values to the job's last step; each step is cut into so many sections."""
        for place in self._places:
            order = Order(
                device=place.device,
                generation=1,
                plan=plan,
                pipeline_generations=(1,) * len(plan.pipelines),
                schedules=(kind,) * len(plan.pipelines),
                boundary=0,
                num_sections=num_sections,
                initial=True,
            )
            self._tell(place, order)
        records: dict[int, CommitRecord] = {}
        finished: dict[Place, Finished] = {}
        while finished.keys() != set(plan.places):
            for place, message in self._hear():
                match message:
                    case StepCommitted(record=record):
                        records[record.step] = record
                    case Finished():
                        finished[place] = message
                    case _:
                        pass
        return Trained(records=tuple(record for _, record in sorted(records.items())), finished=finished)

    def _hear(self) -> list[tuple[Place, WorkerMessage]]:
        """Wait for words of any worker; those for other workers are passed on."""
        heard: list[tuple[Place, WorkerMessage]] = []
        events = self._selector.select(_TIMEOUT_S)
        if not events:
            raise RuntimeError(f"no worker said anything for {_TIMEOUT_S:g} s")
        for key, _ in events:
            place, decoder = key.data
            data = self._sockets[place].recv(1 << 16)
            if not data:
                raise RuntimeError(f"the worker of {place} is gone")
            for message in decoder.feed(data):
                if isinstance(message, WorkerFailed):
                    raise RuntimeError(message.traceback)  # noqa: TRY004
                if isinstance(message, StorePut):
                    for other in self._places:
                        if other != place and other.node in message.nodes:
                            self._tell(other, StoreKeys(keys=((message.key, message.value),)))
                heard.append((place, message))
        return heard

    def _tell(self, place: Place, message: WorkerBound) -> None:
        self._sockets[place].sendall(encode_frame(message))
