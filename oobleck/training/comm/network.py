"""Where a group of a worker listens and connects, and how nothing of it is left behind.

Gloo does not let a message be given up: a thread that waits for a peer which froze waits for a day, and destroying its
group waits for the thread. What wakes it is the end of the connection. Gloo does not give its sockets away, but each
of its devices has an epoll instance of its own, and the kernel lists what is registered there. So each group has a
device, and when it ends, its connections are shut down: first what we say (a peer that is slower still gets all that it
was sent), after a while what we hear as well.

A lazy device connects two members when one of them first sends the other something. It tells connections apart by the
peer's rank alone, which is one more reason not to share it.

Gloo accepts every connection, waits for ever for the first word, and ends the process when no descriptor is left. So
strangers find nothing listening but in the moment in which a group is formed: the kernel drops what they send.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from torch._C._distributed_c10d import ProcessGroupGloo

from .listening import no_place_to_listen

_GRACE_S = 1.0
_POLL_S = 0.02
_MOST_TRIES = 16
_MISLEADING = ("TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")
"""Variables that decide for all devices what is decided here for each."""
_SO_ATTACH_FILTER = 26  # socket(7); Python does not name it
_DROP_ALL = ctypes.create_string_buffer(
    struct.pack("HBBI", 0x06, 0, 0, 0)
)  # the filter's one instruction: keep 0 bytes
_FILTER = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
_opening = threading.Lock()


class _Closable(Protocol):
    def close(self) -> None:
        """Let go of helper threads. May be called again."""


class Network:
    """A Gloo device, what is connected through it, and what must not be let go before that has ended."""

    def __init__(self, address: str, *, is_lazy: bool = False) -> None:
        """Listen at an address. Raises ConfigError for a useless one."""
        with _opening:
            self._device, found = _open_and_find(address, is_lazy=is_lazy)
            # Our own descriptor of it: a device may close its own early, and the number would become another's.
            self._epoll = None if found is None else os.dup(found)
        self._lock = threading.Lock()
        self._kept: list[_Closable] = []
        self._num_forming = 0
        self.is_over = False
        """Whether its groups are given up."""

    @contextmanager
    def forming(self) -> Iterator[object]:
        """Hold the device, for a group to be connected through it. Raises RuntimeError once that is given up.

        A thread that was left behind may come that late; without a device, Gloo ends the process.
        """
        with self._lock:
            if self.is_over:
                raise RuntimeError("given up before it began")
            self._num_forming += 1
        try:
            yield self._device
        finally:
            with self._lock:
                self._num_forming -= 1

    def keep(self, group: _Closable) -> None:
        """Hold a group until its connections have ended: destroying it would wait for them."""
        with self._lock:
            self._kept.append(group)

    def close_door(self) -> None:
        """Let no peer connect any more; what is connected stays so. A kernel that cannot do it leaves the door open."""
        self._on_listeners(lambda listener: listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _FILTER))

    def end(self) -> None:
        """Let go of everything, on a thread of its own that ends with it."""
        with self._lock:
            self.is_over = True
        threading.Thread(target=self._end, daemon=True, name="end of a network").start()

    def _end(self) -> None:
        end_s = time.monotonic() + _GRACE_S
        num_open = self._shut(socket.SHUT_WR)
        while num_open and time.monotonic() < end_s:
            time.sleep(_POLL_S)
            num_open = len(self._connections())
        while self._shut(socket.SHUT_RDWR) or self._num_forming:
            time.sleep(_POLL_S)
        for group in self._kept:  # one may have been formed after all were closed
            group.close()
        self._kept.clear()
        self._device = None
        if self._epoll is not None:
            os.close(self._epoll)
            self._epoll = None

    def _shut(self, how: int) -> int:
        """End all connections that are there; returns how many."""
        connections = self._connections()
        for fd, inode in connections:
            _on_socket(fd, inode, lambda connection: connection.shutdown(how))
        return len(connections)

    def _on_listeners(self, act: Callable[[socket.socket], Any]) -> None:
        for fd, inode in [] if self._epoll is None else _registered_sockets(self._epoll):
            if _is_listening(fd, inode):
                _on_socket(fd, inode, act)

    def _connections(self) -> list[tuple[int, int]]:
        """Descriptors and inodes of what is connected."""
        found = [] if self._epoll is None else _registered_sockets(self._epoll)
        return [(fd, inode) for fd, inode in found if not _is_listening(fd, inode)]


def open_device(address: str, *, is_lazy: bool = False) -> object:
    """Open the network device of an address, a host name or a network interface of this machine.

    Raises ConfigError where no process can listen there.
    """
    for name in _MISLEADING:
        os.environ.pop(name, None)
    try:
        if address in (name for _, name in socket.if_nameindex()):
            return ProcessGroupGloo.create_device(interface=address, lazy_init=is_lazy)
        return ProcessGroupGloo.create_device(hostname=address, lazy_init=is_lazy)
    except RuntimeError as error:
        raise no_place_to_listen(address) from error


def _open_and_find(address: str, *, is_lazy: bool) -> tuple[object, int | None]:
    """Open a device; return it and its epoll instance, None where that cannot be found.

    It has a descriptor that was not there before, unless another thread has closed one meanwhile, whose number the
    device has got: then another one is opened. To look at all descriptors each time costs more than all else that forms
    a group.
    """
    for _ in range(_MOST_TRIES):
        before = _descriptors()
        device = open_device(address, is_lazy=is_lazy)
        for fd in _descriptors() - before:
            if any(_is_listening(*watched) for watched in _registered_sockets(fd)):
                return device, fd
    return device, None


def _descriptors() -> set[int]:
    """The open descriptors of this process."""
    return set(map(int, os.listdir("/proc/self/fd")))


def _registered_sockets(epoll: int) -> list[tuple[int, int]]:
    """The sockets that an epoll instance watches, as descriptors and inodes; none for any other descriptor."""
    try:
        with open(f"/proc/self/fdinfo/{epoll}", encoding="ascii") as lines:
            watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    except FileNotFoundError:  # closed meanwhile
        return []
    found = []
    for fd in watched:
        with suppress(OSError):  # closed meanwhile
            told = os.fstat(fd)
            if stat.S_ISSOCK(told.st_mode):
                found.append((fd, told.st_ino))
    return found


def _is_listening(fd: int, inode: int) -> bool:
    told: list[int] = []
    _on_socket(fd, inode, lambda each: told.append(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))
    return bool(told and told[0])


def _on_socket(fd: int, inode: int, act: Callable[[socket.socket], Any]) -> None:
    """Do something with another's socket, unless it is closed, or its descriptor was taken by something else."""
    with suppress(OSError):
        duplicate = os.dup(fd)
        if os.fstat(duplicate).st_ino != inode:
            os.close(duplicate)
            return
        with socket.socket(fileno=duplicate) as connection:
            act(connection)
