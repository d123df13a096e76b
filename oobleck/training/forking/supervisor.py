"""Forks a process for an agent, with a supervisor between them that waits for its end and reports it.

    agent ──(its socket, a pipe, its log)──> fork server ── fork ──> supervisor ── fork ──> worker or rank
      ^                                                                  │
      └── reports through the pipe: (FORKED, pid, is warm), then (ENDED, pid, wait status)

So a fork server that is busy, stopped or gone never hides how a process ended. Nor does the loss of a supervisor: its
process becomes a child of the fork server (PR_SET_CHILD_SUBREAPER), which reports such ends to all agents. The process
prints to the log of its own agent, which need not be the one that started the server.

Rejected: the fork server waits for its children. The agents of a machine share it, and each of its faults was a fault
of all reports. Also rejected: an agent adopts its ranks. Only the agent that has started the server is their ancestor,
and the kernel reports an end to the living parent alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from .process_names import set_name

REPORT = struct.Struct(">III")
ENDS = (signal.SIGINT, signal.SIGTERM)
"""Signals that a forked process has blocked, so that an early one waits until the process has set its handlers."""
FORKED, ENDED = 0, 1
NUM_DESCRIPTORS = 3
"""A process's own socket, the pipe for reports of it, and the log for its output."""
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 64


def fork_supervised(
    work: Callable[[socket.socket], None], descriptors: list[int], *, leave: Callable[[], None]
) -> int | None:
    """Fork a process that calls `work` with the first of `NUM_DESCRIPTORS` descriptors.

    Closes them here. The supervisor calls `leave`, which closes the server's files. Returns the supervisor's process
    id; None if no process can be made, which the agent notices by the pipe's end.
    """
    pid = _fork()
    if pid == 0:
        with _ending_in_any_case():
            leave()
            _supervise(work, *descriptors, is_warm=False)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


class SpareSupervisor:
    """A supervisor that a warm process has forked in advance, so that a rank costs one fork when it is asked for.

    A fork takes some ten milliseconds in a process as large as that one.
    """

    def __init__(self, work: Callable[[socket.socket], None], *, leave: Callable[[], None]) -> None:
        """The supervisor calls `leave`, which closes the warm process's files. Raises OSError."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # The second fork makes the supervisor a child of the server: any child of the warm process counts as one
            # that a package has left behind.
            if (pid := _fork()) == 0:
                with _ending_in_any_case():
                    if _fork() == 0:
                        self._sock.close()
                        leave()
                        _stand_by(work, theirs)
        if pid is not None:
            os.waitpid(pid, 0)
        number = self._sock.recv(_MESSAGE_BYTES)
        if not number:
            self._sock.close()
            raise OSError("no process can be made")
        self._pid = int(number)

    def supervise(self, descriptors: list[int]) -> bool:
        """Have it fork its process, with the descriptors of `fork_supervised`; return False if it cannot."""
        with self._sock:
            # One that is stopped ends with the warm process, whose group it is in.
            if is_stopped(self._pid):
                return False
            try:
                socket.send_fds(self._sock, [b"f"], descriptors)
            except OSError:
                return False  # It has been killed.
        return True

    def close(self) -> None:
        """Have it end, unless it supervises a process."""
        self._sock.close()


def _stand_by(work: Callable[[socket.socket], None], sock: socket.socket) -> None:
    with sock:
        sock.send(str(os.getpid()).encode())
        data, descriptors, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, NUM_DESCRIPTORS)
    if data:
        _supervise(work, *descriptors, is_warm=True)


@contextmanager
def _ending_in_any_case() -> Iterator[None]:
    """End a forked process with the block, whatever happens: the code after it is its parent's."""
    try:
        yield
    except BaseException:  # noqa: BLE001  the agent only sees the pipe's end
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    return False


def _fork() -> int | None:
    try:
        return os.fork()
    except OSError as error:
        traceback.print_exception(error)
        return None


def adopt_orphans(adopts: bool) -> None:
    """Set whether this process becomes the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def _supervise(work: Callable[[socket.socket], None], own: int, report: int, log: int, *, is_warm: bool) -> NoReturn:
    # Out of reach of signals to the server's process group.
    os.setsid()
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    leave_ends_to_agents()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    pid = os.fork()
    if pid == 0:
        os.close(report)
        try:
            work(socket.socket(fileno=own))
        except BaseException:  # noqa: BLE001  no other process reports it
            traceback.print_exc()
        finally:
            os._exit(1)
    # Only the worker holds its socket, so that the agent sees its end.
    os.close(own)
    set_name("oobleck-waits")
    # If the agent has ended, the process soon ends too, and must still be waited for.
    with suppress(BrokenPipeError):
        os.write(report, REPORT.pack(FORKED, pid, is_warm))
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        os.write(report, REPORT.pack(ENDED, pid, status))
    os._exit(0)


def leave_ends_to_agents() -> None:
    """Ignore signals to all processes at once: a terminal's Ctrl-C, and Slurm's notice to a whole step."""
    # The agent receives them as well, and knows what to do before its workers may end.
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
