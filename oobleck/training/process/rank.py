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

from oobleck.control.protocol import TRACE_SIGNAL, BecomeRank
from oobleck.training.forking import ENDS, set_command_line, set_name
from oobleck.wire import FrameDecoder

from .generators import reseed_generators
from .import_log import ImportLog
from .rank_log import RankLog

_F_SETSIG = 10
_OWN_FRAMES = ("runpy.py", "<frozen runpy>", __file__)

_guard: socket.socket | None = None
"""The agent's end is closed when the agent ends; kept for as long as the process lives."""

_stacks: TextIO | None = None


def run_rank(sock: socket.socket, *, imports: int) -> NoReturn:
    """Be what the agent says, until its end. `imports` is the descriptor of a log of imports."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)  # it may have been asked to end before it began
    setup, overflow = _receive(sock)
    _end_with_agent(sock)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
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
    _be_named([sys.executable, "-u", *(["-m"] if setup.entry == "module" else []), *command])
    _be_fresh()
    _leave_stack_when_asked(os.path.dirname(setup.stdout))
    if setup.logs_imports:
        sys.meta_path.insert(0, ImportLog(imports))
    _leave(_run_python(command, is_module=setup.entry == "module"))


def _receive(sock: socket.socket) -> tuple[BecomeRank, socket.socket]:
    """What the agent says, and where it takes what no file does."""
    sock.setblocking(True)
    decoder = FrameDecoder[BecomeRank](BecomeRank)
    data, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 1)
    while data and descriptors:
        if said := decoder.feed(data):
            os.set_inheritable(descriptors[0], False)
            return said[0], socket.socket(fileno=descriptors[0])
        data = sock.recv(1 << 16)
    os._exit(1)  # the agent has ended


def _end_with_agent(sock: socket.socket) -> None:
    """Have the kernel kill this process when its agent ends, whatever it executes by then, and without a thread."""
    global _guard
    _guard = sock
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_inheritable(sock.fileno(), True)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if poll.poll(0):  # it had ended before
        os._exit(1)


def _redirect(stdout: str, stderr: str, overflow: socket.socket) -> None:
    """Write to files, line by line: what is written is there however the process ends."""
    sys.stdout = sys.__stdout__ = _output(1, stdout, sys.stdout, overflow)  # type: ignore[misc]  # what Python has there
    sys.stderr = sys.__stderr__ = _output(2, stderr, sys.stderr, overflow)  # type: ignore[misc]  # the same
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _output(number: int, path: str, before: TextIO, overflow: socket.socket) -> io.TextIOWrapper:
    """A stream as Python has made it, but of a file; with the encoding and its errors as Python has chosen them."""
    file = io.BufferedWriter(RankLog(number, path, overflow))  # type: ignore[type-var]  # it writes whatever a buffer has
    output = io.TextIOWrapper(file, before.encoding, before.errors, newline="\n", line_buffering=True)
    output.mode = "w"  # type: ignore[misc]  # as Python does
    return output


def _be_named(words: list[str]) -> None:
    """Be shown as torchrun's ranks are."""
    sys.orig_argv = words
    set_command_line(words)
    set_name(os.path.basename(sys.executable))


def _be_fresh() -> None:
    """Undo what all forks of a server would share."""
    importlib.invalidate_caches()
    reseed_generators()
    torch = sys.modules.get("torch")
    if torch is not None and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        torch.set_num_threads(int(threads))


def _leave_stack_when_asked(directory: str) -> None:
    """Have where all threads are written to a file at a signal, whatever they are in, be it native code."""
    global _stacks
    try:
        _stacks = open(os.path.join(directory, "stacks.log"), "w", encoding="utf-8")  # noqa: SIM115  kept for good
    except OSError:  # the disk is full
        _stacks = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  the same
    faulthandler.register(TRACE_SIGNAL, file=_stacks, all_threads=True)


def _run_python(command: list[str], *, is_module: bool) -> int:
    """Run a script or a module as `__main__`; returns the exit status."""
    sys.argv = list(command)
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(command[0])))
    try:
        if is_module:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(command[0])
    except SystemExit as end:
        return _status(end.code)
    except BaseException as error:  # noqa: BLE001  the script's own
        _tell(error)
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


def _status(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _tell(error: BaseException) -> None:
    """Print an exception as Python does, and leave it where torchrun's ranks do, unless the script has done so."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN_FRAMES:
        frames = frames.tb_next
    error = error.with_traceback(frames)
    sys.excepthook(type(error), error, frames)
    _leave_error(error)


def _leave_error(error: BaseException) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    callstack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    message = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    with suppress(OSError), open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(message, file)  # without it, the agent reads the end of what the rank has written


def _leave(status: int) -> NoReturn:
    """End as an interpreter does: threads that are no daemons first, then what was registered for the exit."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing's processes do
        atexit._run_exitfuncs()
        _finalize()
    except BaseException:  # noqa: BLE001  the script's own
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120
    os._exit(status)


def _finalize() -> None:
    """Have the script's objects finalized, and files that it has left open written, as when an interpreter ends.

    Rejected: to end the interpreter itself (`Py_FinalizeEx`). In a forked process libraries would wait there for
    threads that only the process before had.
    """
    _flush_files()  # first: a text file that is collected together with its buffer may lose what it has
    sys.modules.pop("__main__", None)
    gc.collect()
    _flush_files()


def _flush_files() -> None:
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):  # not isinstance: a library's stand-ins would import what they stand for
            with suppress(OSError, ValueError):  # closed, or full
                each.flush()
