"""The process groups of an attempt: they are torn down when a rank is lost, whatever their collectives wait for.

A collective on Gloo that waits for a rank has no other end than its connections': `ProcessGroup.abort` does nothing
there (torch 2.13). So the connections of each group are noted as it is made, and shut down here. Whoever waits for
them, in this process or in another, gets an error, and so does each later collective of the group: none returns a
result that lacks a rank's part.

Gloo forgets to tell a waiting sender whose message it cannot write, and a waiting receiver once a message has come in
part (pair.cc, `signalException`): such a wait would last until the group's timeout. So connections are only shut down
for reading, once they are at rest; each process does so by itself, and keeps them open for the others until the next
attempt. A process that still hangs is given up.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

from .stores import connect_once_served

_FDS = "/proc/self/fd"
_TCP_INFO_BYTES = 136
_MOVED = struct.Struct("=QQ")
_MOVED_AT = 120
"""Where the kernel's `tcp_info` has the numbers of bytes that were acknowledged and received."""
_REST_S = 0.005
_LOOK_S = 0.001
_CLOSES_WITHIN_S = 0.1


class Groups:
    """Notes the connections of all groups that this process makes."""

    def __init__(self) -> None:
        self._inodes: set[int] = set()
        self._held: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_watching = False
        self._is_over = False

    def watch(self) -> None:
        """Note the connections of groups from now on. Torch's own functions are wrapped: they have no hook for that."""
        if self._is_watching:
            return
        import torch.distributed as dist  # here, because a rank whose script has no groups needs no torch

        c10d: Any = dist.distributed_c10d
        make = c10d._new_process_group_helper

        def make_and_note(*args: object, **kwargs: object) -> object:
            before = set(_connected())
            try:
                return make(*args, **kwargs)
            finally:
                self._inodes |= set(_connected()) - before

        c10d._new_process_group_helper = make_and_note
        connect_once_served(lambda: self._is_over)
        self._is_watching = True

    def interrupt(self, *, within_s: float) -> None:
        """Have all collectives fail, those that are under way and those to come. Any thread may call this.

        It waits up to `within_s` seconds for connections to rest.
        """
        self._is_over = True
        with self._lock:
            for connection in self._hold():
                self._held.append(connection)
            self._await_rest(time.monotonic() + within_s)
            for connection in self._held:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)
        if (dist := _loaded()) is not None:
            for group in list(dist.distributed_c10d._world.pg_map):
                # NCCL's; what cannot be aborted is given up with the process.
                with suppress(RuntimeError):
                    group.abort()

    def may_have_raised(self, error: BaseException | None) -> bool:
        """Whether an error, or one that led to it, may be a collective's: of torch's own kind, or with a lost peer."""
        dist, seen = _loaded(), set[int]()
        while error is not None and id(error) not in seen:
            if dist is not None and isinstance(error, dist.DistError):
                return True
            if isinstance(error, RuntimeError) and self._has_lost_one():
                return True
            seen.add(id(error))
            error = error.__cause__ or error.__context__
        return False

    def _has_lost_one(self) -> bool:
        """Whether Gloo has closed a connection: it does so where a rank is gone, a moment after the error."""
        until_s = time.monotonic() + _CLOSES_WITHIN_S
        while self._inodes <= {inode for inode, _ in _sockets()}:
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def leave(self, *, within_s: float) -> None:
        """Release all groups, so that others can be made after `forget`."""
        self.interrupt(within_s=within_s)
        if (dist := _loaded()) is None:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        else:
            # A group that was not made has its number all the same, and others that begin with 0 would not meet.
            dist.distributed_c10d._world.group_count = 0

    def forget(self) -> None:
        """Close all connections, since every rank has left its groups."""
        for connection in self._held:
            connection.close()
        self._held.clear()
        self._inodes.clear()
        self._is_over = False

    def _await_rest(self, until_s: float) -> None:
        before, since_s = None, time.monotonic()
        while (now_s := time.monotonic()) < until_s:
            moved = [_moved(each) for each in self._held]
            if moved != before or any(waiting for _, waiting in moved):
                before, since_s = moved, now_s
            elif now_s >= since_s + _REST_S:
                break
            time.sleep(_LOOK_S)

    def _hold(self) -> Iterator[socket.socket]:
        """Yield the noted connections that are not held yet, by descriptors of our own."""
        held = {os.fstat(each.fileno()).st_ino for each in self._held}
        for inode, fd in _sockets():
            if inode not in self._inodes or inode in held:
                continue
            with suppress(OSError):
                connection = socket.socket(fileno=os.dup(fd))
                # The number may be another file's by now.
                if os.fstat(connection.fileno()).st_ino == inode:
                    held.add(inode)
                    yield connection
                else:
                    connection.close()


def _moved(connection: socket.socket) -> tuple[tuple[int, int], int]:
    """Return the bytes that a connection has sent and received so far, and how many are not read yet."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (unread,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, b"\0" * 4))
    except OSError:
        return (0, 0), 0
    sent, received = _MOVED.unpack_from(info, _MOVED_AT) if len(info) >= _TCP_INFO_BYTES else (0, 0)
    return (sent, received), unread


def are_made() -> bool:
    """Whether the process has a default group."""
    return (dist := _loaded()) is not None and bool(dist.is_initialized())


def _loaded() -> Any | None:
    dist: ModuleType | None = sys.modules.get("torch.distributed")
    return dist if dist is not None and hasattr(dist, "distributed_c10d") else None


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield (inode, descriptor) of each socket."""
    for name in os.listdir(_FDS):
        with suppress(OSError):
            found = os.stat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield found.st_ino, int(name)


def _connected() -> Iterator[int]:
    """Yield the inodes of this process's TCP connections."""
    for inode, fd in _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            # A socket that listens has no peer; shut down, it would end the process from within Gloo.
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                yield inode
