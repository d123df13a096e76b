"""An agent's side of a fork server, which forks processes whose supervisors report their ends (see `_REPORT`).

If a supervisor is gone, the fork server reports the end in its place.

The first agent of a job on a machine starts the server, which ends with its last client. If it ends earlier, the forked
processes live on, and the first agent to notice starts another server.
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
from pathlib import Path
from typing import IO

import trio

from oobleck.control import protocol
from oobleck.errors import WorkersUnavailable
from oobleck.host.machine import num_oom_kills
from oobleck.runtime.files import RUN_ENVIRONMENT, AgentDir, ProcessId, stat_fields
from oobleck.runtime.listening import listen_at

# A report is (FORKED, pid, is warm) once a process exists, then (ENDED, pid, wait status).
_REPORT = struct.Struct(">III")
_SUPERVISOR = "oobleck-waits"
_ANY = b"f"
_COLD = b"c"
_LISTEN_BACKLOG = 64
_START_TIMEOUT_S = 120.0
_PATIENCE_S = 30.0  # for a server that has forked before: a big process on a busy machine takes a second
_MAX_RESTARTS = 3
_RESTARTS_WITHIN_S = 600.0  # the time within which _MAX_RESTARTS are allowed
_RETRY_S = 0.5  # before starting a server again after a failed start
_STOPPED_POLL_S = 0.5
_REAPED_WITHIN_S = 2.0
_POLL_S = 0.05


def _end_of(wait_status: int) -> protocol.ProcessEnd:
    code = os.waitstatus_to_exitcode(wait_status)
    return protocol.Exited(exit_code=code) if code >= 0 else protocol.Killed(signal=-code)


class ForkedProcess:
    def __init__(self, pid: int, report: trio.lowlevel.FdStream, *, is_warm: bool) -> None:
        """`report` comes from the process's supervisor; `is_warm` says that its imports were done before the fork."""
        self.pid = pid
        self.is_warm = is_warm
        self.ended = trio.Event()
        self.end: protocol.ProcessEnd = protocol.Unseen()
        self._report = report
        self._id = ProcessId.of(pid)
        self._has_report = trio.Event()

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.ended.is_set() and self._id is not None:  # None if it ended before we could read its id
            self._id.send(number)

    async def follow(self) -> None:
        """Wait until the process has ended; set `end` if that is reported, and `ended` in any case."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give_up_report, nursery.cancel_scope)
            if (end := await _next_report(self._report)) is not None:
                self.note_end(end[2])
            await self._has_report.wait()
            nursery.cancel_scope.cancel()
        await self._report.aclose()
        self.ended.set()

    def note_end(self, wait_status: int) -> None:
        """Note the end that a supervisor or the fork server reports."""
        self.end = _end_of(wait_status)
        self._has_report.set()

    async def _give_up_report(self, scope: trio.CancelScope) -> None:
        """Cancel the wait for a report some time after the end: the supervisor may be stopped, or gone as well."""
        while self._id is not None and self._id.lives:  # noqa: ASYNC110  there is no event to wait for
            await trio.sleep(_POLL_S)
        with trio.move_on_after(_REAPED_WITHIN_S):
            await self._reaped()
        if (supervisor := _supervisor_of(self.pid)) is not None:
            supervisor.send(signal.SIGKILL)  # then the fork server waits in its place
        # Until the fork server has reaped the process, the report is only late: the server may be busy.
        with trio.move_on_after(_PATIENCE_S):
            await self._reaped()
        await trio.sleep(_REAPED_WITHIN_S)
        scope.cancel()

    async def _reaped(self) -> None:
        while self._id is not None and self._id.is_zombie:  # noqa: ASYNC110  there is no event to wait for
            await trio.sleep(_POLL_S)


def _supervisor_of(pid: int) -> ProcessId | None:
    """Return the supervisor of a process, if it has not reaped it."""
    match stat_fields(pid):
        case ["Z", parent, *_]:
            with suppress(OSError, ValueError):
                if Path(f"/proc/{parent}/comm").read_text().strip() == _SUPERVISOR:
                    return ProcessId.of(int(parent))
    return None


async def _next_report(report: trio.lowlevel.FdStream) -> tuple[int, int, int] | None:
    data = b""
    with suppress(trio.BrokenResourceError):
        while len(data) < _REPORT.size:
            if not (more := await report.receive_some(_REPORT.size - len(data))):
                return None
            data += more
        return _REPORT.unpack(data)
    return None


class _Connection:
    def __init__(self, stream: trio.SocketStream, process: ProcessId | None) -> None:
        self.ended = trio.Event()
        self._has_forked = False
        self._stream = stream
        self._process = process

    async def fork(self, descriptor: int, *, is_cold: bool) -> ForkedProcess | None:
        """Fork a process that uses this socket; None if the server is gone, stopped, or too slow."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        report = trio.lowlevel.FdStream(reading)
        first = None
        with trio.move_on_after(_PATIENCE_S if self._has_forked else _START_TIMEOUT_S):
            with ExitStack() as sent, suppress(OSError, trio.ClosedResourceError):
                # The pipe ends only once every copy of `writing` is closed, so ours must not outlive the request.
                sent.callback(os.close, writing)
                # A cold request makes the server fork itself, and end the warm process that would fork otherwise.
                await send_descriptors(self._stream.socket, _COLD if is_cold else _ANY, (descriptor, writing, 2))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_if_stopped, nursery.cancel_scope)
                first = await _next_report(report)
                nursery.cancel_scope.cancel()
        if first is None:
            await report.aclose()
            return None
        self._has_forked = True
        return ForkedProcess(first[1], report, is_warm=bool(first[2]))

    async def _cancel_if_stopped(self, scope: trio.CancelScope) -> None:
        while True:
            await trio.sleep(_STOPPED_POLL_S)
            # A stopped server would hold this agent up until the time limit.
            if self._process is not None and self._process.is_stopped:
                scope.cancel()

    async def receive(
        self, report: Callable[[protocol.RanksCold], Awaitable[None]], note_end: Callable[[int, int], None]
    ) -> None:
        """Handle the server's messages, until it ends."""
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
                                await report(protocol.RanksCold(problem=str(problem)))
        self.ended.set()

    def kill(self) -> None:
        if self._process is not None:
            self._process.send(signal.SIGKILL)


class ForkServer:
    """The fork server of an agent, restarted when it ends. `run` must be running."""

    def __init__(
        self, directory: AgentDir, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> None:
        """`command` receives its listening socket's descriptor; `environment` is the agent's by default."""
        self._directory = directory
        self._command = tuple(command)
        self._environment = dict(os.environ if environment is None else environment)
        self._server: _Connection | None = None
        self._server_pid: int | None = None
        self.has_started = False
        """Whether this agent has started a server; another agent on this machine may have."""
        self.settled = trio.Event()
        """Set while there is a server, which may still warm up, and once there will be no other."""
        self._given_up: str | None = None
        self._living: dict[int, ForkedProcess] = {}
        self._ends_s: deque[float] = deque(maxlen=_MAX_RESTARTS + 1)
        self._forked, self._to_follow = trio.open_memory_channel[ForkedProcess](math.inf)
        self._report, self._reports = trio.open_memory_channel[protocol.ForkServerEnded | protocol.RanksCold](
            _MAX_RESTARTS + 1
        )
        self.server_ended = self._reports.receive
        """Waits until a fork server or its warm process ends unexpectedly; returns how it ended."""

    async def run(self) -> None:
        """Connect to the fork server, start it when there is none, and follow the processes that it forks."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, nursery)
            while self._given_up is None:
                try:
                    with trio.fail_after(_START_TIMEOUT_S):
                        server = await self._connect()
                except (OSError, trio.TooSlowError) as error:  # no memory or no process: there may be some in a moment
                    end = await self._server_end()  # the server may have started and ended
                    if isinstance(end, protocol.Unseen):
                        is_locked = isinstance(error, trio.TooSlowError)
                        locked = "another agent of this machine has locked it, and may be stopped"
                        end = protocol.NotStarted(problem=locked if is_locked else str(error))
                    await self._report_end(end)
                    await trio.sleep(_RETRY_S)
                    continue
                self._server = server
                self.settled.set()
                await server.receive(self._report.send, self._note_end)
                # Those who wait for `settled` from here on wait for the next server.
                self._server, self.settled = None, trio.Event()
                await self._report_end(await self._server_end())
            self.settled.set()

    async def _follow(self, nursery: trio.Nursery) -> None:
        async for process in self._to_follow:
            self._living[process.pid] = process
            nursery.start_soon(self._follow_one, process)

    async def _follow_one(self, process: ForkedProcess) -> None:
        await process.follow()
        # The kernel may have given the pid to a newer process since.
        if self._living.get(process.pid) is process:
            del self._living[process.pid]

    def _note_end(self, pid: int, wait_status: int) -> None:
        # The process has no supervisor any more, and may be another agent's.
        if (process := self._living.get(pid)) is not None:
            process.note_end(wait_status)

    async def _report_end(self, end: protocol.ServerEnd) -> None:
        """Report the server's end, and give up after too many."""
        now_s = trio.current_time()
        self._ends_s.append(now_s)
        if len(self._ends_s) > _MAX_RESTARTS and self._ends_s[0] > now_s - _RESTARTS_WITHIN_S:
            how = protocol.server_end_text(end)
            self._given_up = f"its fork server ended {len(self._ends_s)} times within ten minutes, at last: {how}"
        await self._report.send(protocol.ForkServerEnded(end=end, is_restarted=self._given_up is None))

    async def _server_end(self) -> protocol.ServerEnd:
        """Return how the server ended, if this agent started it."""
        pid, self._server_pid = self._server_pid, None
        if pid is not None:
            with trio.move_on_after(_REAPED_WITHIN_S), suppress(ChildProcessError):
                while True:
                    # Only the parent of a process can learn how it ended.
                    reaped, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222  it does not wait
                    if reaped:
                        return _end_of(status)
                    await trio.sleep(_POLL_S)
        return protocol.Unseen()

    async def fork(self) -> tuple[ForkedProcess, trio.SocketStream]:
        """Fork a process, with the next server if this one is gone; returns it with our end of its socket.

        Raises WorkersUnavailable once the server has ended too often.
        """
        while self._given_up is None:
            await self.settled.wait()
            if (server := self._server) is None:
                continue  # it ended in the meantime
            # The warm process may hang in what it imported, so the server itself is asked before it is killed.
            for is_cold in (False, True):
                ours, theirs = trio.socket.socketpair()
                with ExitStack() as unless_forked:
                    unless_forked.callback(ours.close)  # ends a process that is forked too late
                    with theirs:
                        process = await server.fork(theirs.fileno(), is_cold=is_cold)
                    if process is not None:
                        unless_forked.pop_all()
                        self._forked.send_nowait(process)
                        return process, trio.SocketStream(ours)
            server.kill()
            await server.ended.wait()
        raise WorkersUnavailable(self._given_up)

    async def _connect(self) -> _Connection:
        path = self._directory.fork_server_socket
        # Without the lock, two agents that find no server at the same time would each start one.
        with open(self._directory.fork_server_lock, "w") as lock:  # noqa: ASYNC230  a local file, held for milliseconds
            await _lock(lock)
            self._end_other()
            try:
                stream = await trio.open_unix_socket(path)
            except OSError:
                self._server_pid = _start_fork_server(self._command, path, self._environment)
                self._directory.note_fork_server(self._server_pid)
                self.has_started = True
                stream = await trio.open_unix_socket(path)
        return _Connection(stream, ProcessId.read(self._directory.fork_server_pid))

    def _end_other(self) -> None:
        """End a server that the run before has left, if that had other variables, which its processes would have."""
        noted = ProcessId.read(self._directory.fork_server_pid)
        if noted is None:
            return
        own = f"{RUN_ENVIRONMENT}={self._environment.get(RUN_ENVIRONMENT, '')}"
        with suppress(OSError):  # it has ended
            variables = Path(f"/proc/{noted.pid}/environ").read_bytes().split(b"\0")
            found = [each for each in variables if each.startswith(f"{RUN_ENVIRONMENT}=".encode())]
            if (found or [f"{RUN_ENVIRONMENT}=".encode()]) != [own.encode()]:
                noted.send(signal.SIGKILL)
                self._directory.fork_server_socket.unlink(missing_ok=True)


async def _lock(file: IO[str]) -> None:
    # Without a thread: one that waits for a lock cannot be cancelled.
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        await trio.sleep(_POLL_S)


def _start_fork_server(command: Sequence[str], path: Path, environment: Mapping[str, str]) -> int:
    """Start the server, and return its pid."""
    # The socket listens before the server runs, so clients can connect while it warms up.
    with listen_at(path, _LISTEN_BACKLOG) as listener:
        process = subprocess.Popen(
            [*command, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
    process.returncode = 0  # else this object would warn when it is collected before the server's end
    return process.pid


async def send_descriptors(sock: trio.socket.SocketType, request: bytes, descriptors: Sequence[int]) -> None:
    """Send descriptors along with a byte. Raises OSError."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
    await sock.sendmsg([request], ancillary)


class OomKills:
    """Tells the kernel's kills for lack of memory from other kills by SIGKILL."""

    def __init__(self, count: Callable[[], int] = num_oom_kills) -> None:
        self._count = count
        self._num_explained = count()

    def explain(self, process: ForkedProcess) -> protocol.ProcessEnd:
        """Return how a process ended, and whether the kernel killed it; the same for each call."""
        # Only the count of the agent's cgroup, which its workers and ranks share, tells the two apart. Each kill that
        # it counts explains one end.
        if process.end == protocol.Killed(signal=signal.SIGKILL) and self._count() > self._num_explained:
            self._num_explained += 1
            process.end = protocol.Killed(signal=signal.SIGKILL, is_out_of_memory=True)
        return process.end
