"""The ranks of a script: forked from a server of their own, with files for their output and errors."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import socket
from contextlib import suppress
from pathlib import Path

import trio

from oobleck.control import protocol
from oobleck.control.node_ranks import RankSetup, rank_environment
from oobleck.errors import BadStep, ConfigError, PeerError, StatesLost, WorkersUnavailable
from oobleck.host.interfaces import resolved_interface
from oobleck.host.machine import num_gpus
from oobleck.host.process_group import signal_group
from oobleck.job.ranks import RanksSpec
from oobleck.runtime.files import AgentDir, stat_fields
from oobleck.runtime.python_process import module_command
from oobleck.runtime.script_command import check_command
from oobleck.storage import scripts
from oobleck.wire import decode_json, encode_frame

from .fork_client import ForkedProcess, ForkServer, OomKills, send_descriptors
from .rank_output import RankOutput
from .rank_states import RankStates

_MODULE = "oobleck.training.process.rank_server"
# The kernel shows a process's name from the memory of the server's command line, so that must have room for names.
_ROOM = " " * 2048
_READ_BYTES = 1 << 15
# A process's own fault raises these signals, and native code may have written about it.
_OWN_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
_STDERR = 2
_log = logging.getLogger("oobleck.agent")
_NO_PORT = "1"


class Rank:
    """A rank's process, from its agent's side."""

    def __init__(
        self,
        process: ForkedProcess,
        guard: trio.SocketStream,
        line: socket.socket,
        overflow: socket.socket,
        logs: Path,
        *,
        host: RankProcesses,
        local_rank: int,
        can_trace: bool,
    ) -> None:
        """Closing `guard`, also by the agent's end, ends the process; `overflow` brings what its files cannot take."""
        self.pid = process.pid
        self.is_warm = process.is_warm
        self.can_stay = False
        self._process = process
        self._host = host
        self._guard = guard
        self._line = line
        self._overflow = overflow
        self._can_trace = can_trace
        self._local_rank = local_rank
        self._write_to(logs)

    def _write_to(self, logs: Path) -> None:
        self._problem: str | None = None
        self._error_file = logs / "error.json"
        self._stack_file = logs / "stacks.log"
        self._flight_file = logs / "flight.json"
        self._output = {False: RankOutput(logs / "stdout.log"), True: RankOutput(logs / "stderr.log")}

    async def wait(self) -> protocol.ProcessEnd | None:
        has_left = False
        async with trio.open_nursery() as nursery:

            async def hear() -> None:
                nonlocal has_left
                has_left = await self._hear()
                if has_left:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(hear)
            await self._process.ended.wait()
            nursery.cancel_scope.cancel()
        if has_left and not self._process.ended.is_set():
            return None
        # The rank's pid is also the id of its process group, which stays reserved while any child in it lives.
        signal_group(self.pid)
        self._guard.socket.close()
        self._line.close()
        # What is still in the socket would be lost with it.
        self._take_overflow(is_last=True)
        self._overflow.close()
        return self._host.oom_kills.explain(self._process)

    async def _hear(self) -> bool:
        """Hear what the rank says; return whether it waits for its next place, or False once it is gone."""
        with suppress(OSError):
            while True:
                await trio.lowlevel.wait_readable(self._line)
                match self._line.recv(1):
                    case b"":
                        break
                    case protocol.WAITS:
                        return True
                    case said:
                        self.can_stay = said == protocol.ATTEMPTS
        return False

    def kill(self) -> None:
        self._process.kill()

    def ask_to_end(self) -> None:
        self._process.send(signal.SIGTERM)

    def interrupt(self, *, after_save: bool) -> None:
        with suppress(OSError):  # it has ended
            self._line.send(encode_frame(protocol.InterruptRank(after_save=after_save)))

    async def place(self, setup: RankSetup) -> bool:
        if self._process.ended.is_set():
            await self.wait()
            return False
        self._local_rank = setup.local_rank
        order, logs = self._host.order_for(setup, self.pid)
        self._take_overflow()
        self._overflow.close()
        self._overflow, theirs = _overflow_pair()
        self._write_to(logs)
        # A duplicate, because a stream closes its socket.
        line = trio.SocketStream(trio.socket.from_stdlib_socket(self._line.dup()))
        with theirs, suppress(OSError, trio.BrokenResourceError):  # it has ended already, which `wait` reports
            await _send(line, order, (theirs.fileno(),))
        await line.aclose()
        return True

    def error(self, end: protocol.ProcessEnd) -> protocol.RankError | None:
        # The script writes this file, so it may be missing or hold anything.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            message = json.loads(self._error_file.read_text(encoding="utf-8"))["message"]
            text, detail = message, ""
            if not isinstance(message, str):
                text, detail = str(message["message"]), str(message.get("extraInfo", {}).get("py_callstack", ""))
            is_lost = text.startswith(f"{StatesLost.__name__}: ")
            is_bad = text.startswith(f"{BadStep.__name__}: ")
            return protocol.RankError(
                message=text,
                detail=detail.rstrip(),
                is_exception=True,
                has_lost_states=is_lost,
                bad=self._host.bad_losses(self._local_rank) if is_bad else None,
            )
        if isinstance(end, protocol.Killed) and end.signal not in _OWN_SIGNALS:
            return None  # another process killed it, so its last output is not about its end
        tail = self._output[True].tail().rstrip()
        return protocol.RankError(message=tail.splitlines()[-1], detail=tail) if tail else None

    def written_bytes(self) -> int:
        return sum(output.size() for output in self._output.values())

    def used_s(self) -> float:
        return sum(map(int, stat_fields(self.pid)[11:13])) / os.sysconf("SC_CLK_TCK")

    def ask_for_stack(self) -> None:
        # A program that is not Python has no stack to show, and the signal would end it.
        if self._can_trace:
            self._process.send(protocol.TRACE_SIGNAL)
            self._process.send(protocol.FLIGHT_SIGNAL)

    def stack(self) -> str:
        with suppress(OSError):
            stack = self._stack_file.read_text(encoding="utf-8", errors="replace")
            _log.info("process %d hangs with the others:\n%s", self.pid, stack)
            return stack
        return ""

    def groups(self) -> tuple[protocol.GroupRecord, ...]:
        try:
            return decode_json(protocol.FlightRecord, self._flight_file.read_bytes()).groups
        except (OSError, PeerError):
            return ()

    def new_problem(self) -> str | None:
        self._take_overflow()
        problem, self._problem = self._problem, None
        return problem

    def _take_overflow(self, *, is_last: bool = False) -> None:
        # The rank may write to a file again after it sent what the file did not take, so the sizes come first.
        num_written = {is_error: output.num_written() for is_error, output in self._output.items()}
        # Output left in the socket makes the rank wait, so it writes no faster than its output is shown.
        while is_last or not any(output.is_behind for output in self._output.values()):
            try:
                data = self._overflow.recv(_READ_BYTES)
            except OSError:  # there is no more, or the socket is closed
                data = b""
            if not data:
                for is_error, output in self._output.items():
                    output.note_ordered(num_written[is_error])
                return
            number, problem, after = protocol.OVERFLOW_HEAD.unpack_from(data)
            output = self._output[number == _STDERR]
            output.overflow(data[protocol.OVERFLOW_HEAD.size :], after)
            self._problem = f"{output.path}: {os.strerror(problem)}"

    def new_output(self, *, is_error: bool, is_last: bool) -> str:
        return self._output[is_error].new(is_last=is_last)

    def note_shown(self, *, is_error: bool) -> None:
        self._output[is_error].note_shown()


class RankProcesses:
    """Starts the ranks of a node. `run` must be running."""

    _server: ForkServer  # once `prepare` has created it

    def __init__(self, directory: AgentDir, *, logs: Path, states: RankStates) -> None:
        """`logs` is the directory for the ranks' output, unless the user names another one."""
        self._directory = directory
        self._states = states
        self.num_saved = states.num_saved
        self.keep_states = states.keep
        self.keep_in_memory = states.keep_in_memory
        self.recall = states.recall
        self.copy = states.copy
        self.bad_losses = states.bad_losses
        self.next_report = states.next_report
        self.settle = states.settle
        self.leave = states.leave
        self._logs = logs
        self.oom_kills = OomKills()
        self._has_server = trio.Event()
        self._port: socket.socket | None = None

    async def run(self) -> None:
        """Keep the fork server running once `prepare` has created it, until cancelled."""
        await self._has_server.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._states.run)
            await self._server.run()

    async def server_ended(self) -> protocol.ForkServerEnded | protocol.RanksCold:
        await self._has_server.wait()
        return await self._server.server_ended()

    def address_of(self, name: str) -> str:
        """Return the address of a network interface; any other name is an address already. Raises ConfigError."""
        try:
            return resolved_interface(name)
        except OSError as error:
            raise ConfigError(
                f"other nodes cannot reach this one by its network interface {name}: {error.strerror}; name another "
                "one, or an address, by address= in the hostfile"
            ) from error

    async def open_door(self, run: RanksSpec, address: str) -> protocol.CopyDoor | None:
        return await self._states.open_door(run, self._directory.node, address)

    async def prepare(self, run: RanksSpec, devices: tuple[int, ...]) -> int:
        """Start the fork server, and return the node's number of ranks. Raises ConfigError."""
        check_command(run, os.environ)
        num_ranks = _num_ranks(run.ranks_per_node, devices)
        self._states.open(run)
        if run.log_dir is not None:
            self._logs = _in_directory(run, run.log_dir) / run.tag
        self._logs /= self._directory.node
        await trio.to_thread.run_sync(_remove_attempts, self._logs)
        # A directory that cannot hold logs is reported here, before any rank starts.
        _make_logs(self._logs / "attempt_0" / "0")
        environment = {**run.environment}
        if num_ranks > 1:  # here, because libraries may read it when the server loads them
            environment.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        command = module_command(_MODULE, str(self._directory.fork_warmth), _ROOM)
        self._server = ForkServer(self._directory, command, environment={**os.environ, **environment})
        self._has_server.set()
        await self._check_server(run)
        return num_ranks

    async def _check_server(self, run: RanksSpec) -> None:
        """Fork a process, to learn early what keeps ranks from starting. Raises ConfigError."""
        try:
            process, guard = await self._server.fork()
        except WorkersUnavailable as error:
            named = sorted(name for name in run.environment if name.startswith(("PYTHON", "LD_")))
            given = f"; it was given --env {', '.join(named)}" if named else ""
            raise ConfigError(f"{error}{given}; the end of the agent's log has more") from error
        guard.socket.close()  # which ends the process
        await process.ended.wait()

    def reserve_port(self) -> int:
        """Return a free port, and keep it for the ranks."""
        # A socket that is bound but does not listen keeps the port from being given away, and lets a rank listen there.
        if self._port is not None:
            self._port.close()
        self._port = sock = _bound()
        port: int = sock.getsockname()[1]
        return port

    async def start(self, setup: RankSetup, *, is_spare: bool = False) -> Rank:
        """Fork a rank. Raises WorkersUnavailable, or ConfigError if its files cannot be created."""
        process, guard = await self._server.fork()
        try:
            order, logs = self.order_for(setup, process.pid, is_spare=is_spare)
        except ConfigError:
            guard.socket.close()  # which ends the process
            raise
        overflow, theirs = _overflow_pair()
        line, their_line = socket.socketpair()
        line.setblocking(False)
        with theirs, their_line, suppress(OSError, trio.BrokenResourceError):  # it has ended, which `wait` reports
            await _send(guard, order, (theirs.fileno(), their_line.fileno()))
        can_trace = setup.run.entry != "program"
        return Rank(process, guard, line, overflow, logs, host=self, local_rank=setup.local_rank, can_trace=can_trace)

    def order_for(self, setup: RankSetup, pid: int, *, is_spare: bool = False) -> tuple[protocol.BecomeRank, Path]:
        """Prepare a process's place, and return the order for it, and its directory. Raises ConfigError."""
        logs = self._logs / f"attempt_{setup.attempt}" / ("spare" if is_spare else str(setup.local_rank))
        _make_logs(logs)
        if not is_spare:
            self._states.begin(setup.order.start, num_nodes=setup.order.num_groups)
        self._directory.note_process("spare" if is_spare else f"rank{setup.local_rank}", pid)
        return self._order(setup, logs, is_spare=is_spare), logs

    def is_warm(self) -> bool:
        return self._directory.fork_warmth.exists()

    def _order(self, setup: RankSetup, logs: Path, *, is_spare: bool = False) -> protocol.BecomeRank:
        run = setup.run
        environment = {**os.environ, **rank_environment(setup, os.environ)}
        environment["TORCHELASTIC_ERROR_FILE"] = str(logs / "error.json")
        environment |= {**self._states.environment, scripts.START_VARIABLE: setup.order.start}
        environment[scripts.LOCAL_RANK_VARIABLE] = str(setup.local_rank)
        environment[scripts.GRACE_VARIABLE] = str(run.shutdown_timeout_s)
        environment[scripts.COPIES_VARIABLE] = str(run.room_for_copies if setup.order.num_groups > 1 else 0)
        if setup.order.saved_step is not None:
            environment[scripts.SAVED_VARIABLE] = str(setup.order.saved_step)
        if is_spare:
            # A script may choose a file or a device by these before its attempts, but no rank serves others there.
            environment |= {"RANK": str(setup.order.world_size - 1), "MASTER_PORT": _NO_PORT}
        return protocol.BecomeRank(
            entry=run.entry,
            command=tuple(word.replace("${local_rank}", str(setup.local_rank)) for word in run.command),
            directory=os.path.abspath(run.directory),  # the fork server may have started elsewhere
            environment=environment,
            stdout=str(logs / "stdout.log"),
            stderr=str(logs / "stderr.log"),
            logs_imports=run.is_warmed and setup.local_rank == 0,
            is_spare=is_spare,
        )


def _overflow_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a line for what a rank's files do not take: the agent's, and the rank's."""
    # Packets keep the head of each piece of output with its data.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


async def _send(stream: trio.SocketStream, order: protocol.BecomeRank, descriptors: tuple[int, ...]) -> None:
    frame = encode_frame(order)
    # Descriptors travel only along with data, so they go with the order's first byte.
    await send_descriptors(stream.socket, frame[:1], descriptors)
    await stream.send_all(frame[1:])


def _remove_attempts(logs: Path) -> None:
    """Remove the logs of an earlier run, but nothing else that the user keeps there."""
    for attempt in logs.glob("attempt_*"):
        shutil.rmtree(attempt, ignore_errors=True)


def _make_logs(directory: Path) -> None:
    """Create a directory with a rank's files. Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("stdout.log", "stderr.log"):
            (directory / name).touch(mode=0o600)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # on a full disk, ranks run without these files
            raise ConfigError(f"--log-dir: {directory}: {error.strerror}") from error


def _in_directory(run: RanksSpec, path: str) -> Path:
    return Path(run.directory, os.path.expanduser(path))


def _bound() -> socket.socket:
    try:
        sock = socket.socket(socket.AF_INET6)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's store sets it too
        sock.bind(("::", 0))
    except OSError:  # no IPv6 here
        sock = socket.socket(socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 0))
    return sock


def _num_ranks(asked: str, devices: tuple[int, ...]) -> int:
    """Raises ConfigError if there is nothing of the kind to count."""
    match asked:
        case "slots":
            return len(devices)
        case "cpu":
            return os.cpu_count() or 1
        case "gpu" | "auto":
            count = num_gpus()
            if not count and asked == "gpu":
                raise ConfigError("--nproc-per-node gpu: there is no GPU here")
            return count or os.cpu_count() or 1
        case _:
            return int(asked)
