"""What a fork server does for an agent: it forks processes, whose ends other processes report (see `_REPORT`).

Where such a process is gone, the fork server reports the end in its place; one that is stopped is ended for that.

The first agent of a job on a machine that needs the server starts it; it ends with its last client. Where it ends
before, the processes that it has forked live on, and the first agent that notices starts another one.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import trio

from oobleck.control import protocol
from oobleck.control.protocol import Killed, ProcessEnd
from oobleck.errors import WorkersUnavailable
from oobleck.host.machine import num_oom_kills
from oobleck.runtime.files import AgentDir, ProcessId
from oobleck.runtime.listening import listen_at

_REPORT = struct.Struct(">III")
"""That a process exists: its number, and whether it is warm. Then that it has ended: its number, and how."""
_SUPERVISOR = "oobleck-waits"
_ANY = b"f"
_COLD = b"c"
_LISTEN_BACKLOG = 64
_START_TIMEOUT_S = 120.0
_PATIENCE_S = 30.0
"""How long a server that has forked before may take to fork again: a big process on a busy machine takes a second."""
_MAX_RESTARTS = 3
_RESTARTS_WITHIN_S = 600.0  # a server that ends again after so many restarts within this time is not started again
_TRY_AGAIN_S = 0.5  # before a server is started again that could not be
_STOPPED_S = 0.5  # how often to look whether a server that does not answer is stopped: it is not waited for
_LAST_WORDS_S = 2.0  # how long a process that is gone may take to be reaped
_LOOK_S = 0.05  # how often to look whether a process lives


def _end_of(wait_status: int) -> protocol.ProcessEnd:
    code = os.waitstatus_to_exitcode(wait_status)
    return protocol.Exited(exit_code=code) if code >= 0 else protocol.Killed(signal=-code)


class ForkedProcess:
    """A process that a server has forked: whether it lives, and how it ended."""

    def __init__(self, pid: int, report: trio.lowlevel.FdStream, *, is_warm: bool) -> None:
        """`report` comes from the process that waits for it."""
        self.pid = pid
        self.is_warm = is_warm
        """Whether it was forked from a process that has imported what earlier ones did."""
        self.ended = trio.Event()
        self.end: protocol.ProcessEnd = protocol.Unseen()
        self._report = report
        self._id = ProcessId.of(pid)
        self._told = trio.Event()

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send it a signal; nothing where it has ended."""
        if not self.ended.is_set() and self._id is not None:  # else it had ended before we could look
            self._id.send(number)

    async def follow(self) -> None:
        """Learn how it ended, or at least that it did, and set `ended`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look, nursery.cancel_scope)
            if (end := await _next_report(self._report)) is not None:
                self.note_end(end[2])
            await self._told.wait()
            nursery.cancel_scope.cancel()
        await self._report.aclose()
        self.ended.set()

    def note_end(self, wait_status: int) -> None:
        """Note how it ended; whoever has waited for it says so."""
        self.end = _end_of(wait_status)
        self._told.set()

    async def _look(self, scope: trio.CancelScope) -> None:
        """Look whether it lives: the process that waits for it may be stopped, or gone with the fork server."""
        while self._id is not None and self._id.lives:  # noqa: ASYNC110  nothing tells
            await trio.sleep(_LOOK_S)
        await trio.sleep(_LAST_WORDS_S)
        if (supervisor := _supervisor_of(self.pid)) is not None:
            supervisor.send(signal.SIGKILL)  # the fork server waits in its place then
            await trio.sleep(_LAST_WORDS_S)
        scope.cancel()


def _supervisor_of(pid: int) -> ProcessId | None:
    """The process that waits for this one, and has not noticed its end."""
    with suppress(OSError, ValueError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        if state == "Z" and Path(f"/proc/{parent}/comm").read_text().strip() == _SUPERVISOR:
            return ProcessId.of(int(parent))
    return None


async def _next_report(report: trio.lowlevel.FdStream) -> tuple[int, int, int] | None:
    """Return the next report; None where there is no more."""
    data = b""
    with suppress(trio.BrokenResourceError):
        while len(data) < _REPORT.size:
            if not (more := await report.receive_some(_REPORT.size - len(data))):
                return None
            data += more
        return _REPORT.unpack(data)
    return None


class _Connection:
    """The connection to a fork server."""

    def __init__(self, stream: trio.SocketStream, process: ProcessId | None) -> None:
        self.has_answered = False
        """Whether it has forked anything: it may still be starting."""
        self.ended = trio.Event()
        self._stream = stream
        self._process = process

    async def fork(self, descriptor: int, *, is_cold: bool) -> ForkedProcess | None:
        """Fork a process that speaks through this socket; None where the server is gone, or does not answer in time.

        `is_cold` has the server itself fork, and end the process that would do so in its place.
        """
        reading, writing = os.pipe2(os.O_CLOEXEC)
        report = trio.lowlevel.FdStream(reading)
        first = None
        with trio.move_on_after(_PATIENCE_S if self.has_answered else _START_TIMEOUT_S):
            with ExitStack() as sent, suppress(OSError, trio.ClosedResourceError):
                sent.callback(os.close, writing)
                await send_descriptors(self._stream.socket, _COLD if is_cold else _ANY, (descriptor, writing))
            first = await self._first_report(report)
        if first is None:
            await report.aclose()
            return None
        self.has_answered = True
        return ForkedProcess(first[1], report, is_warm=bool(first[2]))

    async def _first_report(self, report: trio.lowlevel.FdStream) -> tuple[int, int, int] | None:
        """Return the first report; None where there is none, or will be none for as long as the server is stopped."""
        first = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look, nursery.cancel_scope)
            first = await _next_report(report)
            nursery.cancel_scope.cancel()
        return first

    async def _look(self, scope: trio.CancelScope) -> None:
        while True:
            await trio.sleep(_STOPPED_S)
            if self._process is not None and self._process.is_stopped:
                scope.cancel()

    async def hear(
        self, tell: Callable[[protocol.RanksCold], Awaitable[None]], note_end: Callable[[int, int], None]
    ) -> None:
        """Hear what the server has to say, until it ends."""
        buffered = b""
        async with self._stream:
            with suppress(trio.BrokenResourceError):
                while data := await self._stream.receive_some(4096):
                    *lines, buffered = (buffered + data).split(b"\n")
                    for line in lines:
                        match json.loads(line):
                            case {"ended": int(pid), "status": int(status)}:
                                note_end(pid, status)
                            case {"problem": problem}:
                                await tell(protocol.RanksCold(problem=str(problem)))
        self.ended.set()

    def kill(self) -> None:
        """End the server, which does not answer."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)


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
        self._server_pid: int | None = None  # the one that this agent has started
        self.has_started = False
        """Whether this agent has started one, and not another of this machine."""
        self._settled = trio.Event()  # there is a server, or there will be none any more
        self._given_up: str | None = None
        self._living: dict[int, ForkedProcess] = {}
        self._ends_s: deque[float] = deque(maxlen=_MAX_RESTARTS + 1)
        self._follow_up, self._followed = trio.open_memory_channel[ForkedProcess](math.inf)
        self._say, self._said = trio.open_memory_channel[protocol.ForkServerEnded | protocol.RanksCold](
            _MAX_RESTARTS + 1
        )

    async def settled(self) -> None:
        """Wait until there is a server, which may still warm up, or there will be none any more."""
        await self._settled.wait()

    async def run(self) -> None:
        """Connect to the fork server, starting it where there is none, as often as it takes; hear of workers' ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, nursery)
            while self._given_up is None:
                try:
                    with trio.fail_after(_START_TIMEOUT_S):
                        server = await self._connect()
                except OSError as error:  # no memory, no process: there may be some in a moment
                    end = await self._how_it_ended()  # if it was started: before it could be spoken to
                    await self._tell_end(
                        protocol.NotStarted(problem=str(error)) if isinstance(end, protocol.Unseen) else end
                    )
                    await trio.sleep(_TRY_AGAIN_S)
                    continue
                self._server = server
                self._settled.set()
                await server.hear(self._say.send, self._note_end)
                self._server, self._settled = None, trio.Event()
                await self._tell_end(await self._how_it_ended())
            self._settled.set()

    async def _follow(self, nursery: trio.Nursery) -> None:
        """Follow the processes that were forked, however their server fares."""
        async for process in self._followed:
            self._living[process.pid] = process
            nursery.start_soon(self._follow_one, process)

    async def _follow_one(self, process: ForkedProcess) -> None:
        await process.follow()
        if self._living.get(process.pid) is process:
            del self._living[process.pid]

    def _note_end(self, pid: int, wait_status: int) -> None:
        """Note the end of a process whose supervisor is gone; it may be another agent's."""
        if (process := self._living.get(pid)) is not None:
            process.note_end(wait_status)

    async def server_ended(self) -> protocol.ForkServerEnded | protocol.RanksCold:
        """Wait until a fork server, or the warm process of one, ends that was not meant to; returns how it ended."""
        return await self._said.receive()

    async def _tell_end(self, end: protocol.ServerEnd) -> None:
        """Say that the server has ended; give up where that was too often."""
        now_s = trio.current_time()
        self._ends_s.append(now_s)
        if len(self._ends_s) > _MAX_RESTARTS and self._ends_s[0] > now_s - _RESTARTS_WITHIN_S:
            how = protocol.server_end_text(end)
            self._given_up = f"its fork server ended {len(self._ends_s)} times within ten minutes, at last: {how}"
        await self._say.send(protocol.ForkServerEnded(end=end, is_restarted=self._given_up is None))

    async def _how_it_ended(self) -> protocol.ServerEnd:
        """Say how the server ended, which only the agent hears that has started it."""
        pid, self._server_pid = self._server_pid, None
        if pid is None:
            return protocol.Unseen()
        with trio.move_on_after(_LAST_WORDS_S):
            while True:
                try:
                    reaped, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222  it does not wait
                except ChildProcessError:
                    break
                if reaped:
                    return _end_of(status)
                await trio.sleep(_LOOK_S)
        return protocol.Unseen()

    async def fork(self) -> tuple[ForkedProcess, trio.SocketStream]:
        """Fork a process, by the next server if this one is gone; returns it, and the socket through which it hears.

        Raises WorkersUnavailable when servers have ended so often that there is no next one.
        """
        while self._given_up is None:
            await self._settled.wait()
            if (server := self._server) is None:
                continue  # it ended just now
            for is_cold in (False, True):
                ours, theirs = trio.socket.socketpair()
                with ExitStack() as unless_forked:
                    unless_forked.callback(ours.close)  # by which a process that is forked too late ends
                    with theirs:
                        process = await server.fork(theirs.fileno(), is_cold=is_cold)
                    if process is not None:
                        unless_forked.pop_all()
                        self._follow_up.send_nowait(process)
                        return process, trio.SocketStream(ours)
            server.kill()
            await server.ended.wait()
        raise WorkersUnavailable(self._given_up)

    async def _connect(self) -> _Connection:
        path = self._directory.fork_server_socket
        with open(self._directory.fork_server_lock, "w") as lock:  # noqa: ASYNC230  a local file, held for milliseconds
            await trio.to_thread.run_sync(fcntl.flock, lock, fcntl.LOCK_EX)
            try:
                stream = await _open_socket(path)
            except OSError:
                self._server_pid = _start_fork_server(self._command, path, self._environment)
                self._directory.note_fork_server(self._server_pid)
                self.has_started = True
                stream = await _open_socket(path)
        return _Connection(stream, ProcessId.read(self._directory.fork_server_pid))


async def _open_socket(path: Path) -> trio.SocketStream:
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await sock.connect(str(path))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def _start_fork_server(command: Sequence[str], path: Path, environment: Mapping[str, str]) -> int:
    """Start the server on a socket that exists at once, so that clients may connect while it warms up.

    Returns its process id.
    """
    with listen_at(path, _LISTEN_BACKLOG) as listener:
        process = subprocess.Popen(
            [*command, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
    process.returncode = 0  # nobody waits for it through this object, whose end is not the server's
    return process.pid


async def send_descriptors(sock: trio.socket.SocketType, request: bytes, descriptors: Sequence[int]) -> None:
    """Send descriptors along with a byte. Raises OSError."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
    await sock.sendmsg([request], ancillary)


class OomKills:
    """Tells a process that the kernel has killed for lack of memory from one that somebody else has killed.

    It goes by the count that the agent's cgroup keeps; its workers and ranks are in the same one.

    Each kill of the kernel explains one end. Both are SIGKILL, and only the count tells them apart.
    """

    def __init__(self, count: Callable[[], int] = num_oom_kills) -> None:
        self._count = count
        self._num_explained = count()

    def explain(self, process: ForkedProcess) -> ProcessEnd:
        """Return how a process has ended, with what the kernel says of it; the same whenever it is asked."""
        process.end = self._explained(process.end)
        return process.end

    def _explained(self, end: ProcessEnd) -> ProcessEnd:
        if end != Killed(signal=signal.SIGKILL):
            return end
        if self._count() <= self._num_explained:
            return end
        self._num_explained += 1
        return replace(end, is_out_of_memory=True)
