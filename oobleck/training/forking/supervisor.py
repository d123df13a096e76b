"""Forks a process for an agent, with a supervisor between them that waits for its end and reports it.

    agent ──(its socket, a pipe)──> fork server ── fork ──> supervisor ── fork ──> worker or rank
      ^                                                         │
      └── reports through the pipe: (FORKED, pid, is warm), then (ENDED, pid, wait status)

So a fork server that is busy, stopped or gone never hides how a process ended. Nor does the loss of a supervisor: its
process becomes a child of the fork server (PR_SET_CHILD_SUBREAPER), which reports such ends to all agents.

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
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from .process_names import set_name

REPORT = struct.Struct(">III")
ENDS = (signal.SIGINT, signal.SIGTERM)
"""Signals that a forked process has blocked, so that an early one waits until the process has set its handlers."""
FORKED, ENDED = 0, 1
_PR_SET_CHILD_SUBREAPER = 36


def fork_supervised(
    work: Callable[[socket.socket], None], descriptors: list[int], *, is_warm: bool, leave: Callable[[], None]
) -> int | None:
    """Fork a process that calls `work` with the first descriptor, a socket; the second, a pipe, receives its reports.

    Closes both here. The supervisor calls `leave`, which closes the server's files. Returns the supervisor's process
    id; None from a warm process, and if no process can be made, which the agent notices by the pipe's end.
    """
    # A supervisor that a warm process forks becomes the server's child, by a second fork: any child of the warm process
    # counts as one that a package has left behind.
    pid = _fork()
    if is_warm and pid == 0 and _fork() != 0:
        os._exit(0)
    if is_warm and pid:
        os.waitpid(pid, 0)
    if pid == 0:
        try:
            # Out of reach of signals to the server's process group.
            os.setsid()
            leave()
            _supervise(work, *descriptors, is_warm=is_warm)
        except BaseException:  # noqa: BLE001  the agent only sees the pipe's end
            traceback.print_exc()
        finally:
            # After any error, since the code that follows is the server's.
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    return None if is_warm else pid


def _fork() -> int | None:
    try:
        return os.fork()
    except OSError as error:
        traceback.print_exception(error)
        return None


def adopt_orphans(adopts: bool) -> None:
    """Set whether this process becomes the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def _supervise(work: Callable[[socket.socket], None], own: int, report: int, *, is_warm: bool) -> NoReturn:
    # The server's wakeup socket is shared, and signals of this process must not wake the server.
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
