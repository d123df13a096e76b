"""Worker processes, forked from a warm server that the agents of one job on one machine share.

The first agent to need it starts the server (`oobleck.training.fork_server`); it ends with its last client.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import trio

from oobleck.control.messages import SetUpWorker, WorkerBound, WorkerMessage
from oobleck.errors import WorkersUnavailable
from oobleck.job import JobSpec
from oobleck.roles.channel import MessageChannel
from oobleck.roles.ports import WorkerEnd
from oobleck.wire import FrameDecoder

from .agent_dir import AgentDir
from .process_id import ProcessId

__all__ = ["ForkingWorkerHost", "Worker"]

_ANSWER = struct.Struct(">II")
_FORKED = 0
_LISTEN_BACKLOG = 64
_START_TIMEOUT_S = 120.0


class Worker:
    """A forked worker process, from its agent's side."""

    def __init__(self, pid: int, channel: MessageChannel[WorkerBound, WorkerMessage]) -> None:
        self.pid = pid
        self._process = ProcessId.of(pid)
        self._channel = channel
        self._ended = trio.Event()
        self._end = WorkerEnd()

    async def send(self, messages: Sequence[WorkerBound]) -> None:
        await self._channel.send(messages)

    async def receive(self) -> WorkerMessage:
        return await self._channel.receive()

    async def wait(self) -> WorkerEnd:
        await self._ended.wait()
        return self._end

    def kill(self) -> None:
        if self._process is not None:  # else it had ended before we could look
            self._process.send(signal.SIGKILL)

    def note_end(self, wait_status: int | None) -> None:
        """Note how the process ended, as `waitpid` told; None when nobody could tell."""
        if wait_status is not None:
            code = os.waitstatus_to_exitcode(wait_status)
            self._end = WorkerEnd(exit_code=code) if code >= 0 else WorkerEnd(signal=-code)
        self._ended.set()


class ForkingWorkerHost:
    """Starts workers through the fork server. `run` must be running."""

    def __init__(self, directory: AgentDir) -> None:
        self._directory = directory
        self._server: trio.SocketStream | None = None
        self._has_started_server = False
        self._connected = trio.Event()
        self._asking = trio.Lock()
        self._forked, self._answers = trio.open_memory_channel[int](1)
        self._workers: dict[int, Worker] = {}

    async def run(self) -> None:
        """Connect to the fork server, starting it where there is none, and hear of workers' ends."""
        with trio.fail_after(_START_TIMEOUT_S):
            self._server = await self._connect()
        self._connected.set()
        async with self._server:
            await self._hear()
        await self._forked.aclose()
        for worker in self._workers.values():  # the server is gone; nobody hears how they end
            worker.kill()
            worker.note_end(None)

    async def _hear(self) -> None:
        """Hear of forks and of workers' ends, until the server ends."""
        assert self._server is not None
        buffered = b""
        with suppress(trio.BrokenResourceError):
            while data := await self._server.receive_some(4096):
                buffered += data
                while len(buffered) >= _ANSWER.size:
                    first, second = _ANSWER.unpack_from(buffered)
                    buffered = buffered[_ANSWER.size :]
                    await self._understand(first, second)

    async def prepare(self, job: JobSpec, cache_dir: Path) -> None:
        """Tokenise the text while the fork server still imports torch; the agent that started it does so."""
        await self._connected.wait()
        makes_data = job.script is not None and "data" in job.script.provides
        if not self._has_started_server or makes_data or job.data.shards:
            return
        fields = json.dumps(asdict(job.text))
        await trio.run_process(
            [sys.executable, "-m", "oobleck.training.corpus", str(cache_dir), fields],
            stdin=subprocess.DEVNULL,
            check=False,
        )

    async def start(self, setup: SetUpWorker) -> Worker:
        """Fork a worker and set it up. Raises WorkersUnavailable when the fork server is gone."""
        await self._connected.wait()
        assert self._server is not None
        ours, theirs = trio.socket.socketpair()
        with theirs:
            async with self._asking:
                try:
                    await _send_descriptor(self._server.socket, theirs.fileno())
                    pid = await self._answers.receive()
                except (OSError, trio.EndOfChannel) as error:
                    ours.close()
                    raise WorkersUnavailable("its fork server has ended; the agent's log says why") from error
        stream = trio.SocketStream(ours)
        worker = Worker(pid, MessageChannel(stream, FrameDecoder(WorkerMessage)))
        self._workers[pid] = worker
        self._directory.note_process(f"worker{setup.place.device}", pid)
        await worker.send([setup])
        return worker

    async def _understand(self, first: int, second: int) -> None:
        if first == _FORKED:
            await self._forked.send(second)
        elif (worker := self._workers.pop(first, None)) is not None:
            worker.note_end(second)

    async def _connect(self) -> trio.SocketStream:
        path = str(self._directory.fork_server_socket)
        with open(self._directory.fork_server_lock, "w") as lock:  # noqa: ASYNC230  a local file, held for milliseconds
            await trio.to_thread.run_sync(fcntl.flock, lock, fcntl.LOCK_EX)
            try:
                return await _open_socket(path)
            except OSError:
                _start_fork_server(path)
                self._has_started_server = True
                return await _open_socket(path)


async def _open_socket(path: str) -> trio.SocketStream:
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def _start_fork_server(path: str) -> None:
    """Start the server on a socket that exists at once, so that clients may connect while it warms up."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_LISTEN_BACKLOG)
        subprocess.Popen(
            [sys.executable, "-m", "oobleck.training.fork_server", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


async def _send_descriptor(sock: trio.socket.SocketType, descriptor: int) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
    await sock.sendmsg([b"f"], ancillary)
