"""Forks a process for an agent, with another one between that waits for its end and reports it.

    agent ──(its socket, a pipe)──> fork server ── fork ──> supervisor ── fork ──> worker or rank
      ^                                                         │
      └── reports through the pipe: (FORKED, pid, is warm), then (ENDED, pid, wait status)

A fork server that is busy, stopped or gone therefore never hides how a process ended. Nor does a supervisor: where it
is gone, the process becomes the fork server's (PR_SET_CHILD_SUBREAPER), which tells all agents of such ends.

Rejected: the fork server waits for its children. It is shared by the agents of a machine, and each of its faults was a
fault of all reports. Rejected too: an agent that adopts its ranks. Only the agent that has
started the server is an ancestor of them, and the kernel reports an end to the living parent alone.
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
"""A forked process has them blocked: one that arrives early waits until the process has decided what it does then."""
FORKED = 0
ENDED = 1
_PR_SET_CHILD_SUBREAPER = 36


def fork_supervised(
    work: Callable[[socket.socket], None], descriptors: list[int], *, is_warm: bool, leave: Callable[[], None]
) -> int | None:
    """Fork a process that does `work` with the first descriptor, a socket; its life is reported to the second, a pipe.

    Both are closed here. `leave` is called in the supervisor: it closes what belongs to the server. A supervisor that a
    warm process forks becomes the server's child: what is a child of the warm process counts as left by a package.
    Returns the supervisor's process id; None from a warm process, and where no process can be made, which the agent
    sees by the pipe's end.
    """
    pid = _fork()
    if is_warm and pid == 0 and _fork() != 0:
        os._exit(0)
    if is_warm and pid:
        os.waitpid(pid, 0)
    if pid == 0:
        try:
            os.setsid()  # what reaches the server's process group does not reach this
            leave()
            _supervise(work, *descriptors, is_warm=is_warm)
        except BaseException:  # noqa: BLE001  the pipe's end is all that the agent sees of it
            traceback.print_exc()
        finally:
            os._exit(1)  # whatever it was: what comes after this is the server's
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
    """Become the parent of descendants whose own parent ends, or do not any more."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def _supervise(work: Callable[[socket.socket], None], own: int, report: int, *, is_warm: bool) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    leave_ends_to_agents()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    pid = os.fork()
    if pid == 0:
        os.close(report)
        try:
            work(socket.socket(fileno=own))
        except BaseException:  # noqa: BLE001  nobody else tells of it
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(own)
    set_name("oobleck-waits")
    with suppress(BrokenPipeError):  # the agent has ended: so does the process, which is still to be waited for
        os.write(report, REPORT.pack(FORKED, pid, is_warm))
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        os.write(report, REPORT.pack(ENDED, pid, status))
    os._exit(0)


def leave_ends_to_agents() -> None:
    """Ignore what reaches all processes at once: a terminal's Ctrl-C, and the notice that Slurm gives a whole step.

    The agent gets them as well, and knows what has to be done before its workers may end.
    """
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
