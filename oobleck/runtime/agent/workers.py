"""Worker processes, forked from a warm server that the agents of one job on one machine share."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import trio

from oobleck.control.protocol import ForkServerEnded, ProcessEnd, SetUpWorker, WorkerBound, WorkerMessage
from oobleck.job import JobSpec
from oobleck.roles.channel import MessageChannel
from oobleck.runtime.files import AgentDir, stat_fields
from oobleck.runtime.python_process import as_no_rank, module_command
from oobleck.wire import FrameDecoder

from .fork_client import ForkedProcess, ForkServer, OomKills

_log = logging.getLogger("oobleck.agent")

_SERVER = module_command("oobleck.training.process.worker_server")


class Worker(MessageChannel[WorkerBound, WorkerMessage]):
    """A forked worker process, from its agent's side. Closing the channel ends it."""

    def __init__(self, process: ForkedProcess, stream: trio.SocketStream, oom_kills: OomKills) -> None:
        super().__init__(stream, FrameDecoder(WorkerMessage))
        self.pid = process.pid
        self.kill = process.kill
        self._process = process
        self._oom_kills = oom_kills

    async def wait(self) -> ProcessEnd:
        await self._process.ended.wait()
        return self._oom_kills.explain(self._process)

    def processor_s(self) -> float:
        return processor_s(self.pid)


class ForkingWorkerHost:
    """Starts workers through the fork server. `run` must be running."""

    def __init__(self, directory: AgentDir, *, server: Sequence[str] = _SERVER) -> None:
        """`server` is the fork server's command, which receives its listening socket's descriptor."""
        self._directory = directory
        self._oom_kills = OomKills()
        self._server = ForkServer(directory, server, environment=as_no_rank())
        self.run = self._server.run

    async def server_ended(self) -> ForkServerEnded:
        ended = await self._server.server_ended()
        assert isinstance(ended, ForkServerEnded), "the server itself is warm"
        return ended

    async def prepare(self, job: JobSpec, cache_dir: Path) -> None:
        """Tokenise the text while the fork server still imports torch."""
        await self._server.settled.wait()
        makes_data = job.script is not None and "data" in job.script.provides
        # The agents of a machine share the cache, so one does this for all: the one that started the server.
        if not self._server.has_started or makes_data or job.data.shards:
            return
        fields = json.dumps(asdict(job.text))
        try:
            await trio.run_process(
                module_command("oobleck.training.data.corpus", str(cache_dir), fields),
                stdin=subprocess.DEVNULL,
                check=False,
                env=as_no_rank(),
            )
        except OSError as error:  # no memory or no process, for now: the first worker prepares its data itself
            _log.warning("the text is not prepared ahead: %s", error.strerror)

    async def start(self, setup: SetUpWorker) -> Worker:
        process, stream = await self._server.fork()
        worker = Worker(process, stream, self._oom_kills)
        self._directory.note_process(f"worker{setup.worker_id.device}", worker.pid)
        with suppress(trio.BrokenResourceError):  # it has ended already, which `wait` reports
            await worker.send([setup])
        return worker


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# The fields of `stat`, counted from the state, with user and system time of a process and of its reaped children.
_TIMES = slice(11, 15)


def processor_s(pid: int) -> float:
    """Return the CPU time in seconds of a process and its descendants, such as compilers; 0 once it is gone."""
    return sum(int(ticks) for each in family_of(pid) for ticks in stat_fields(each)[_TIMES]) / _TICKS_PER_S


def family_of(pid: int) -> Iterator[int]:
    """Yield a process and its living descendants."""
    yield pid
    with suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # a kernel without this file reports only children that have ended
                for child in Path(f"/proc/{pid}/task/{task}/children").read_bytes().split():
                    yield from family_of(int(child))
