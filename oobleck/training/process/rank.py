"""A rank: a forked process that becomes a Python script, a module or a program, as if it had been started as one."""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import NoReturn, TextIO

from oobleck.control.protocol import OVERFLOW_HEAD, TRACE_SIGNAL, BecomeRank
from oobleck.training.attempts import Line, connect_once_served, set_line
from oobleck.training.forking import ENDS, set_command_line, set_name
from oobleck.wire import FrameDecoder

from . import flight
from .generators import reseed_generators
from .import_log import ImportLog

_CHUNK_BYTES = 1 << 12
_PATIENCE_MS = 5000
"""How long a write waits for the agent to read output that the file does not take."""
_OWN_FRAMES = ("runpy.py", "<frozen runpy>", __file__)

_guard: socket.socket | None = None
_logs: list[_RankLog] = []
_stacks: TextIO | None = None
_directory = ""


def run_rank(sock: socket.socket, *, imports: int) -> NoReturn:
    """Run what the agent asks for until it ends. `imports` is the descriptor of a log of imports."""
    # The agent ends a rank, with what it has started, by a group of this process's number.
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A signal that arrived since the fork takes effect here: the defaults that it meets are in place.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    setup, overflow, line = _receive(sock)
    _end_with_agent(sock)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts; a program gets the default back below
    _redirect(setup.stdout, setup.stderr, overflow)
    os.environ.clear()
    os.environ.update(setup.environment)
    command = list(setup.command)
    try:
        os.chdir(setup.directory)
        if setup.entry == "program":
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvp(command[0], command)  # noqa: S606  the user's own command
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)
    is_module = setup.entry == "module"
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if is_module else []), *command]  # as torchrun's ranks have it
    set_command_line(sys.orig_argv)
    set_name(os.path.basename(sys.executable))
    _be_fresh()
    connect_once_served()
    _leave_stack_when_asked(os.path.dirname(setup.stdout))
    flight.write_when_asked(lambda: os.path.join(_directory, "flight.json"))
    set_line(Line(line, _enter, is_spare=setup.is_spare))
    if setup.logs_imports:
        sys.meta_path.insert(0, ImportLog(imports))
    _leave(_run_python(command, is_module=is_module))


def _receive(sock: socket.socket) -> tuple[BecomeRank, socket.socket, socket.socket]:
    """Receive the agent's order, the socket that takes output which no file takes, and the line to the agent."""
    sock.setblocking(True)
    decoder = FrameDecoder[BecomeRank](BecomeRank)
    data, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 2)
    while data and len(descriptors) == 2:
        # The descriptors come with the first bytes; the order itself may take several reads.
        if orders := decoder.feed(data):
            for each in descriptors:
                os.set_inheritable(each, False)
            overflow, line = descriptors
            return orders[0], socket.socket(fileno=overflow), socket.socket(fileno=line)
        data = sock.recv(1 << 16)
    os._exit(1)  # the agent has ended


def _end_with_agent(sock: socket.socket) -> None:
    """Have the kernel kill this process when its agent ends, whatever program it executes by then."""
    # The agent's end closes with the agent, which raises the signal here: no thread has to wait for that. The global
    # keeps our end open for as long as the process lives.
    global _guard
    _guard = sock
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_inheritable(sock.fileno(), True)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if poll.poll(0):  # the agent ended before the signal was set up
        os._exit(1)


def _enter(setup: BecomeRank, overflow: socket.socket) -> None:
    """Be the rank of another generation, in this process."""
    for log, path in zip(_logs, (setup.stdout, setup.stderr), strict=True):
        log.move(path, overflow)
    _leave_stack_when_asked(os.path.dirname(setup.stdout))
    os.environ.update(setup.environment)


def _redirect(stdout: str, stderr: str, overflow: socket.socket) -> None:
    sys.stdout = sys.__stdout__ = _output(1, stdout, sys.stdout, overflow)  # type: ignore[misc]  # what Python has there
    sys.stderr = sys.__stderr__ = _output(2, stderr, sys.stderr, overflow)  # type: ignore[misc]  # the same
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _output(number: int, path: str, before: TextIO, overflow: socket.socket) -> io.TextIOWrapper:
    """Make a stream like Python's own, with the encoding and error handling that Python chose, but of a file."""
    _logs.append(log := _RankLog(number, path, overflow))
    file = io.BufferedWriter(log)  # type: ignore[type-var]  # it writes whatever a buffer has
    # Buffered by lines, so that output is in the file however the process ends.
    output = io.TextIOWrapper(file, before.encoding, before.errors, newline="\n", line_buffering=True)
    output.mode = "w"  # type: ignore[misc]  # as Python does
    return output


class _RankLog(io.FileIO):
    """A rank's standard stream, to which no write fails: a full disk is no fault of the script's.

    Output that its file does not take goes to the agent, which shows it. Output of child processes, and of libraries in
    other languages, bypasses this class.
    """

    def __init__(self, number: int, path: str, overflow: socket.socket) -> None:
        """`number` becomes the descriptor of the file; `overflow` is a socket of messages."""
        self._path = path
        self._overflow = overflow
        self._room = select.poll()
        self._room.register(overflow, select.POLLOUT)
        self._num_lost = 0
        self._is_open = False
        with suppress(OSError):
            # FileIO takes open descriptors only, and the file may fail to open below.
            os.dup2(null := os.open(os.devnull, os.O_WRONLY), number)
            os.close(null)
        super().__init__(number, "w", closefd=False)
        self.name = "<stdout>" if number == 1 else "<stderr>"
        with suppress(OSError):
            self._open()

    def move(self, path: str, overflow: socket.socket) -> None:
        """Write to another file from now on, and what it does not take to another socket."""
        self._room.unregister(self._overflow)
        self._room.register(overflow, select.POLLOUT)
        self._path, self._overflow, self._num_lost = path, overflow, 0  # the last log to move drops the other socket
        # What is written before there is room for the file goes to the agent, not to the file of the place before.
        self._is_open = False
        with suppress(OSError):
            self._open()

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]  # all that it is passed
        view = memoryview(data).cast("B")
        written = 0
        try:
            # The disk may have room by now.
            if not self._is_open:
                self._open()
            while written < len(view):
                written += super().write(view[written:]) or 0
        except OSError as error:
            self._hand_over(error.errno or 0, bytes(view[written:]))
        return len(view)

    def _open(self) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, self.fileno())
        os.close(file)
        self._is_open = True

    def _hand_over(self, problem: int, data: bytes) -> None:
        """Send the agent unwritten output and the error, as fast as it reads; some is lost if it stops reading."""
        # An agent that is stuck delays a script once, not at each of its writes.
        patience_ms = 0 if self._num_lost else _PATIENCE_MS
        note = b"[oobleck: %d bytes of output are lost here]\n" % self._num_lost if self._num_lost else b""
        told = note + data
        for start in range(0, len(told), _CHUNK_BYTES):
            try:
                self._room.poll(patience_ms)
                head = OVERFLOW_HEAD.pack(self.fileno(), problem, os.fstat(self.fileno()).st_size)
                self._overflow.send(head + told[start : start + _CHUNK_BYTES], socket.MSG_DONTWAIT)
            except OSError:
                self._num_lost += min(len(data), len(told) - start)
                return
            self._num_lost = 0


def _be_fresh() -> None:
    """Undo what all forks of a server would share."""
    # Files may have appeared since the server looked into the directories of modules.
    importlib.invalidate_caches()
    reseed_generators()
    torch = sys.modules.get("torch")
    if torch is not None and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        # A fork keeps torch's number of threads; a fresh process reads it from the environment.
        torch.set_num_threads(int(threads))


def _leave_stack_when_asked(directory: str) -> None:
    """Write the stacks of all threads to a file at a signal, even of threads in native code."""
    global _stacks, _directory
    _directory = directory
    try:
        _stacks = open(os.path.join(directory, "stacks.log"), "w", encoding="utf-8")  # noqa: SIM115  kept for good
    except OSError:  # the disk is full
        _stacks = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  kept for good
    faulthandler.register(TRACE_SIGNAL, file=_stacks, all_threads=True)


def _run_python(command: list[str], *, is_module: bool) -> int:
    """Run a script or a module as `__main__`; returns the exit status."""
    sys.argv = command
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(command[0])))
    try:
        if is_module:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(command[0])
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001  the script's own
        _print_error(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_script(path: str) -> None:
    """Run a file as the interpreter does, by its absolute name; a directory or an archive as runpy does."""
    absolute = os.path.abspath(path)
    if pkgutil.get_importer(absolute) is not None or absolute.endswith(".pyc"):
        runpy.run_path(path, run_name="__main__")
        return
    loader = SourceFileLoader("__main__", absolute)
    code = loader.source_to_code(loader.get_data(absolute), absolute)
    main = sys.modules["__main__"] = ModuleType("__main__")
    kept = {"__file__": absolute, "__cached__": None, "__loader__": loader, "__builtins__": builtins}
    main.__dict__.update(kept, __annotations__={})
    exec(code, main.__dict__)  # noqa: S102  the user's own script


def _print_error(error: BaseException) -> None:
    """Print an exception as Python does, and write it where torchrun's ranks do."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN_FRAMES:
        frames = frames.tb_next
    error = error.with_traceback(frames)
    sys.excepthook(type(error), error, frames)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # A function under `torch.distributed.elastic`'s `@record` has written it already.
    if not path or os.path.exists(path):
        return
    callstack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    message = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    with suppress(OSError), open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(message, file)  # without this file, the agent reads the end of the rank's output


def _leave(status: int) -> NoReturn:
    """End as an interpreter does: join threads that are no daemons, then run exit handlers, then finalize objects."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing's processes do
        atexit._run_exitfuncs()
        # Rejected: `Py_FinalizeEx`. In a forked process, libraries would wait there for threads of the process before.
        gc.unfreeze()  # files are found among what is not frozen
        _flush_files()  # first: a text file that is collected together with its buffer may lose what it has
        sys.modules.pop("__main__", None)
        gc.collect()
        _flush_files()
    except BaseException:  # noqa: BLE001  the script's own
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # Python's own status where standard streams cannot be flushed at exit.
            status = status or 120
    os._exit(status)


def _flush_files() -> None:
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):  # not isinstance: a library's lazy proxies would import their module
            with suppress(OSError, ValueError):  # closed, or full
                each.flush()
