"""What a fork server does for an agent: it forks processes, and says how they end.

The first agent of a job on a machine that needs the server starts it; it ends with its last client. Where it ends
before, the processes that it has forked live on, and the first agent that notices starts another one.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import trio

from oobleck.control.protocol import (
    Exited,
    ForkServerEnded,
    Killed,
    NotStarted,
    ProcessEnd,
    ServerEnd,
    Unseen,
    server_end_text,
)
from oobleck.errors import WorkersUnavailable
from oobleck.runtime.files import AgentDir, ProcessId

__all__ = ["ForkServer", "ForkedProcess"]

_ANSWER = struct.Struct(">II")
_FORKED = 0
_LISTEN_BACKLOG = 64
_START_TIMEOUT_S = 120.0
_MAX_RESTARTS = 3
_RESTARTS_WITHIN_S = 600.0
"""A server that ends again after so many restarts within this time is not started again."""
_TRY_AGAIN_S = 0.5
"""Before a server is started again that could not be."""
_LAST_WORDS_S = 2.0
"""How long a server that is gone may take to be reaped."""
_LOOK_S = 0.05
"""How often to look whether a worker lives whose server has ended: its end is not reported."""


def _end_of(wait_status: int) -> ProcessEnd:
    code = os.waitstatus_to_exitcode(wait_status)
    return Exited(exit_code=code) if code >= 0 else Killed(signal=-code)


class ForkedProcess:
    """A process that a server has forked: whether it lives, and how it ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = trio.Event()
        self.end: ProcessEnd = Unseen()
        self._id = ProcessId.of(pid)

    def note_end(self, wait_status: int | None) -> None:
        """Note how it ended, as `waitpid` said; None when that is not known."""
        if wait_status is not None:
            self.end = _end_of(wait_status)
        self.ended.set()

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send it a signal; nothing where it has ended."""
        if not self.ended.is_set() and self._id is not None:  # else it had ended before we could look
            self._id.send(number)

    async def watch(self) -> None:
        """Look whether it lives until it does not; for one whose parent is gone."""
        while self._id is not None and self._id.lives:  # noqa: ASYNC110  nothing tells
            await trio.sleep(_LOOK_S)
        self.note_end(None)


class _Connection:
    """The connection to a fork server."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.processes: dict[int, ForkedProcess] = {}
        """Those that it has forked for this agent, and that live."""
        self._stream = stream
        self._asking = trio.Lock()
        self._forked, self._answers = trio.open_memory_channel[ForkedProcess](1)

    async def fork(self, descriptor: int) -> ForkedProcess | None:
        """Fork a worker that speaks through this socket; None where the server is gone."""
        async with self._asking:
            try:
                await _send_descriptor(self._stream.socket, descriptor)
                return await self._answers.receive()
            except (OSError, trio.EndOfChannel, trio.ClosedResourceError):
                return None

    async def hear(self) -> None:
        """Hear of forks and of workers' ends, until the server ends."""
        buffered = b""
        async with self._stream, self._forked:
            with suppress(trio.BrokenResourceError):
                while data := await self._stream.receive_some(4096):
                    buffered += data
                    while len(buffered) >= _ANSWER.size:
                        first, second = _ANSWER.unpack_from(buffered)
                        buffered = buffered[_ANSWER.size :]
                        await self._understand(first, second)

    async def _understand(self, first: int, second: int) -> None:
        if first == _FORKED:
            process = self.processes[second] = ForkedProcess(second)
            await self._forked.send(process)
        elif (gone := self.processes.pop(first, None)) is not None:
            gone.note_end(second)


class ForkServer:
    """The fork server of an agent, as often as it has to be started. `run` must be running."""

    def __init__(
        self, directory: AgentDir, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> None:
        """`command` gets the number of its listening socket's descriptor; `environment` is the agent's by default."""
        self._directory = directory
        self._command = tuple(command)
        self._environment = dict(os.environ if environment is None else environment)
        self._server: _Connection | None = None
        self._server_pid: int | None = None
        """The one that this agent has started."""
        self.has_started = False
        """Whether this agent has started one, and not another of this machine."""
        self._settled = trio.Event()
        """There is a server, or there will be none any more."""
        self._given_up: str | None = None
        self._ends_s: deque[float] = deque(maxlen=_MAX_RESTARTS + 1)
        self._say, self._said = trio.open_memory_channel[ForkServerEnded](_MAX_RESTARTS + 1)

    async def settled(self) -> None:
        """Wait until there is a server, which may still warm up, or there will be none any more."""
        await self._settled.wait()

    async def run(self) -> None:
        """Connect to the fork server, starting it where there is none, as often as it takes; hear of workers' ends."""
        async with trio.open_nursery() as nursery:
            while self._given_up is None:
                try:
                    with trio.fail_after(_START_TIMEOUT_S):
                        server = await self._connect()
                except OSError as error:  # no memory, no process: there may be some in a moment
                    end = await self._how_it_ended()  # if it was started: before it could be spoken to
                    await self._tell_end(NotStarted(problem=str(error)) if isinstance(end, Unseen) else end)
                    await trio.sleep(_TRY_AGAIN_S)
                    continue
                self._server = server
                self._settled.set()
                await server.hear()
                self._server, self._settled = None, trio.Event()
                for process in server.processes.values():
                    nursery.start_soon(process.watch)
                await self._tell_end(await self._how_it_ended())
            self._settled.set()

    async def server_ended(self) -> ForkServerEnded:
        """Wait until a fork server ends that was not meant to; returns how it ended, and whether there is another."""
        return await self._said.receive()

    async def _tell_end(self, end: ServerEnd) -> None:
        """Say that the server has ended; give up where that was too often."""
        now_s = trio.current_time()
        self._ends_s.append(now_s)
        if len(self._ends_s) > _MAX_RESTARTS and self._ends_s[0] > now_s - _RESTARTS_WITHIN_S:
            how = server_end_text(end)
            self._given_up = f"its fork server ended {len(self._ends_s)} times within ten minutes, at last: {how}"
        await self._say.send(ForkServerEnded(end=end, is_restarted=self._given_up is None))

    async def _how_it_ended(self) -> ServerEnd:
        """Say how the server ended, which only the agent hears that has started it."""
        pid, self._server_pid = self._server_pid, None
        if pid is None:
            return Unseen()
        with trio.move_on_after(_LAST_WORDS_S):
            while True:
                try:
                    reaped, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222  it does not wait
                except ChildProcessError:
                    break
                if reaped:
                    return _end_of(status)
                await trio.sleep(_LOOK_S)
        return Unseen()

    async def fork(self) -> tuple[ForkedProcess, trio.SocketStream]:
        """Fork a process, by the next server if this one is gone; returns it, and the socket through which it hears.

        Raises WorkersUnavailable when servers have ended so often that there is no next one.
        """
        while self._given_up is None:
            await self._settled.wait()
            if (server := self._server) is None:
                continue  # it ended just now
            ours, theirs = trio.socket.socketpair()
            with ExitStack() as unless_forked:
                unless_forked.callback(ours.close)
                with theirs:
                    process = await server.fork(theirs.fileno())
                if process is not None:
                    unless_forked.pop_all()
                    return process, trio.SocketStream(ours)
        raise WorkersUnavailable(self._given_up)

    async def _connect(self) -> _Connection:
        path = str(self._directory.fork_server_socket)
        with open(self._directory.fork_server_lock, "w") as lock:  # noqa: ASYNC230  a local file, held for milliseconds
            await trio.to_thread.run_sync(fcntl.flock, lock, fcntl.LOCK_EX)
            try:
                stream = await _open_socket(path)
            except OSError:
                self._server_pid = _start_fork_server(self._command, path, self._environment)
                self._directory.note_fork_server(self._server_pid)
                self.has_started = True
                stream = await _open_socket(path)
        return _Connection(stream)


async def _open_socket(path: str) -> trio.SocketStream:
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def _start_fork_server(command: Sequence[str], path: str, environment: Mapping[str, str]) -> int:
    """Start the server on a socket that exists at once, so that clients may connect while it warms up.

    Returns its process id.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_LISTEN_BACKLOG)
        process = subprocess.Popen(
            [*command, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
    process.returncode = 0  # nobody waits for it through this object, whose end is not the server's
    return process.pid


async def _send_descriptor(sock: trio.socket.SocketType, descriptor: int) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
    await sock.sendmsg([b"f"], ancillary)
