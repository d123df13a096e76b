"""The network of one group: where it listens and connects, and how it ends without leaving anything behind.

Gloo cannot abandon a message: a thread that waits for a frozen peer waits for a day, and destroying its group waits
for the thread. Only the end of the connection wakes it. Gloo does not expose its sockets, but each of its devices has
an epoll instance, whose registered sockets the kernel lists. So each group has its own device, and when it ends, its
connections are shut down.

A lazy device connects two members on the first message between them. It distinguishes connections by the peer's rank
alone, which is one more reason not to share it.
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
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo

from oobleck.host.interfaces import interface_names

from .group import Group
from .listening import no_place_to_listen

_GRACE_S = 1.0
_POLL_S = 0.02
_MOST_TRIES = 16
_MISLEADING = ("TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")
_SO_ATTACH_FILTER = 26  # socket(7); Python does not name it
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # one instruction: keep 0 bytes
_FILTER = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
_opening = threading.Lock()


class Network:
    """A Gloo device, its connections, and the groups that must outlive them."""

    def __init__(self, address: str, *, is_lazy: bool = False) -> None:
        """Listen at an address. Raises ConfigError for an unusable one."""
        # One at a time, since the new device is found by the descriptors that appear.
        with _opening:
            self._device, epoll = _open_and_find(address, is_lazy=is_lazy)
            # A descriptor of our own: the device may close its own early, and another file would get the number.
            self._epoll = None if epoll is None else os.dup(epoll)
        self._lock = threading.Lock()
        self._kept: list[Group] = []
        self._num_forming = 0
        self.is_over = False

    @contextmanager
    def forming(self) -> Iterator[object]:
        """Hold the device while a group connects through it. Raises RuntimeError once the network is over."""
        # A thread that was left behind may arrive late, and without a device Gloo ends the process.
        with self._lock:
            if self.is_over:
                raise RuntimeError("given up before it began")
            self._num_forming += 1
        try:
            yield self._device
        finally:
            with self._lock:
                self._num_forming -= 1

    def keep(self, group: Group) -> None:
        """Hold a group until its connections have ended, since destroying it waits for them."""
        with self._lock:
            self._kept.append(group)

    def close_door(self) -> None:
        """Accept no more connections, and keep the present ones. Has no effect if the kernel does not support it."""
        # Gloo accepts every connection, waits forever for its first bytes, and ends the process when no descriptor is
        # left. With this filter, the kernel drops what strangers send.
        for fd, inode in self._sockets(are_listening=True):
            _on_socket(fd, inode, lambda listener: listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _FILTER))

    def end(self) -> None:
        """Release everything, on a thread of its own."""
        with self._lock:
            self.is_over = True
        threading.Thread(target=self._end, daemon=True, name="end of a network").start()

    def _end(self) -> None:
        # For sending first, so that a slower peer still receives everything.
        end_s = time.monotonic() + _GRACE_S
        num_open = self._shut(socket.SHUT_WR)
        while num_open and time.monotonic() < end_s:
            time.sleep(_POLL_S)
            num_open = len(self._sockets(are_listening=False))
        # A thread that still forms the group may open more connections, and needs the device until it has failed.
        while self._shut(socket.SHUT_RDWR) or self._num_forming:
            time.sleep(_POLL_S)
        # One may have been formed after all groups were closed.
        for group in self._kept:
            group.close()
        self._kept.clear()
        self._device = None
        if self._epoll is not None:
            os.close(self._epoll)
            self._epoll = None

    def _shut(self, how: int) -> int:
        """Shut all connections down; return how many there are."""
        connections = self._sockets(are_listening=False)
        for fd, inode in connections:
            _on_socket(fd, inode, lambda connection: connection.shutdown(how))
        return len(connections)

    def _sockets(self, *, are_listening: bool) -> list[tuple[int, int]]:
        """Return the descriptors and inodes of the device's listeners, or of its connections."""
        sockets = [] if self._epoll is None else _registered_sockets(self._epoll)
        return [(fd, inode) for fd, inode in sockets if _is_listening(fd, inode) == are_listening]


def open_device(address: str, *, is_lazy: bool = False) -> object:
    """Open a Gloo device at an address, host name or network interface. Raises ConfigError if none can listen there."""
    # These variables would override `is_lazy`.
    for name in _MISLEADING:
        os.environ.pop(name, None)
    try:
        if address in interface_names():
            return ProcessGroupGloo.create_device(interface=address, lazy_init=is_lazy)
        return ProcessGroupGloo.create_device(hostname=address, lazy_init=is_lazy)
    except RuntimeError as error:
        raise no_place_to_listen(address) from error


def _open_and_find(address: str, *, is_lazy: bool) -> tuple[object, int | None]:
    """Open a device; return it and its epoll instance, or None where that is not found."""
    # Only new descriptors are examined: examining all of them costs more than the rest of forming a group. There is no
    # new one if another thread has closed a descriptor whose number the device then got: another device is opened.
    for _ in range(_MOST_TRIES):
        before = _descriptors()
        device = open_device(address, is_lazy=is_lazy)
        for fd in _descriptors() - before:
            if any(_is_listening(*watched) for watched in _registered_sockets(fd)):
                return device, fd
    return device, None


def _descriptors() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))


def _registered_sockets(epoll: int) -> list[tuple[int, int]]:
    """Return the sockets that an epoll instance watches, as descriptors and inodes; none for other descriptors."""
    try:
        with open(f"/proc/self/fdinfo/{epoll}", encoding="ascii") as lines:
            watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    except FileNotFoundError:  # closed meanwhile
        return []
    sockets = []
    for fd in watched:
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                sockets.append((fd, status.st_ino))
    return sockets


def _is_listening(fd: int, inode: int) -> bool:
    return bool(_on_socket(fd, inode, lambda each: each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))


def _on_socket(fd: int, inode: int, act: Callable[[socket.socket], Any]) -> Any:
    """Act on Gloo's socket and return the outcome; do nothing if it was closed and its descriptor used for another."""
    with suppress(OSError):
        # The duplicate is checked and used, since Gloo may close its own descriptor at any moment.
        duplicate = os.dup(fd)
        if os.fstat(duplicate).st_ino != inode:
            os.close(duplicate)
            return None
        with socket.socket(fileno=duplicate) as connection:
            return act(connection)
    return None
