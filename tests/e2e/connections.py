"""The connections of another process, to be broken or silenced while all processes live.

A debugger's rights are needed for that, as for reading its memory: `pidfd_getfd` gives us its sockets.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_PIDFD_GETFD = 438
"""The number of the system call, on every architecture."""
_SO_ATTACH_FILTER = 26


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def break_connections(pid: int) -> int:
    """Shut down a process's TCP connections, as a router that lost its state does; returns how many there were."""
    return sum(_each(pid, lambda taken: taken.shutdown(socket.SHUT_RDWR)))


def silence_connections(pid: int, *, port: int | None = None) -> int:
    """Have the kernel drop what arrives on a process's TCP connections: nobody is told of an error.

    With a port, only on those from or to it. New connections are not concerned. Returns how many there were.
    """
    drop_all = (_Instruction * 1)(_Instruction(code=0x06, jt=0, jf=0, k=0))  # BPF: return 0 bytes of each packet
    program = bytes(_Program(1, drop_all))
    return sum(_each(pid, lambda taken: taken.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program), port))


def _each(pid: int, act, port: int | None = None) -> Iterator[bool]:
    for connection in psutil.Process(pid).net_connections("tcp"):
        is_open = connection.status == psutil.CONN_ESTABLISHED
        if is_open and (port is None or port in (connection.laddr.port, connection.raddr.port)):
            with _taken(pid, connection.fd) as taken:
                act(taken)
            yield True


@contextmanager
def _taken(pid: int, fd: int) -> Iterator[socket.socket]:
    """Another process's socket, for us to use beside it."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        copied = libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(process)
    with socket.socket(fileno=copied) as taken:
        yield taken
