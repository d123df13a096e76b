"""The server of a process that forks others on request, once it has imported what they need.

Importing torch and transformers takes seconds, a fork milliseconds. The agents of one user and job on one machine
share a fork server, which listens on a UNIX socket. A client sends one byte with two descriptors as ancillary data: a
socket between the forked process and its agent, and a pipe for reports of its start and end (see `supervisor`). The
server's own messages are lines of JSON.

The server runs a single thread and no torch operation, so that forking is safe. It ends when its last client has left.

Rejected: Python's own fork server (`multiprocessing.forkserver`). It belongs to the process that started it and ends
with it, so agents could not share one, and a worker's parent would end with the first agent. Also rejected: starting
workers directly. That needs no server but repeats the seconds of imports, and a killed worker should be back in a
fraction of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Protocol

from .supervisor import NUM_DESCRIPTORS, adopt_orphans, fork_supervised

COLD = b"c"
"""A request that this process itself has to serve; it may pass others to a `Forker`."""

_IDLE_TIMEOUT_S = 20.0
_PAUSE_S = 0.1
_TELLING_S = 2.0


class Forker(Protocol):
    """Another process that can fork in the server's place."""

    def tick(self) -> float:
        """Do what is due, and return the seconds until the next call."""

    def fork(self, descriptors: list[int]) -> bool:
        """Have a process forked there and close the descriptors, or do nothing and return False if it cannot."""

    def spurn(self) -> None:
        """End the process, since it has not answered."""

    def note_end(self, pid: int, status: int) -> None:
        """Note the end of a child of the server, which may be that process."""

    def leave(self) -> None:
        """Close what a forked process must not hold."""

    def close(self) -> None:
        """End the process, since the server ends."""


class ForkServer:
    """The loop of the server, and a `Forker`'s view of it."""

    def __init__(
        self,
        listener: socket.socket,
        work: Callable[[socket.socket], None],
        forker: Callable[[ForkServer], Forker] | None,
    ) -> None:
        """A forked process calls `work` with its agent's socket; it never returns."""
        self._listener = listener
        self._work = work
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._child_wakeup, self._wakeup_fd = _child_signals()
        self._selector.register(self._child_wakeup, selectors.EVENT_READ)
        self._clients: dict[int, socket.socket] = {}
        self._supervisors: set[int] = set()
        self._forker = forker(self) if forker is not None else None

    def serve(self) -> None:
        """Serve until the last client has left."""
        try:
            while True:
                due_s = self._forker.tick() if self._forker is not None else None
                # The agent that started the server may have ended before it connected.
                events = self._selector.select(due_s if self._clients else _IDLE_TIMEOUT_S)
                if not events and not self._clients:
                    return
                for key, _ in events:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._child_wakeup:
                        self._child_wakeup.recv(4096)
                        self._reap()
                    elif isinstance(key.fileobj, socket.socket):
                        self._answer(key.fileobj)
                if not self._clients and not self._supervisors:
                    return
        finally:
            if self._forker is not None:
                self._forker.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            # The client or the last descriptor is gone, and others still need this server.
            sys.stderr.write(f"the fork server cannot accept a client: {error.strerror}\n")
            time.sleep(_PAUSE_S)
            return
        self._clients[client.fileno()] = client
        self._selector.register(client, selectors.EVENT_READ)

    def _answer(self, client: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(client, 1, NUM_DESCRIPTORS)
        except OSError:
            data, descriptors = b"", []
        if not data or len(descriptors) != NUM_DESCRIPTORS:
            for descriptor in descriptors:
                os.close(descriptor)
            self._drop(client)
            return
        if self._forker is not None:
            if data == COLD:
                self._forker.spurn()
            elif self._forker.fork(descriptors):
                return
        pid = fork_supervised(self._work, descriptors, leave=self.leave)
        if pid is not None:
            self._supervisors.add(pid)

    def leave(self) -> None:
        """Close the server's files in a forked process."""
        # Nothing is unregistered: the forked process shares the epoll instance, and the server still needs it.
        self._selector.close()
        signal.set_wakeup_fd(-1)
        os.close(self._wakeup_fd)
        for other in (self._listener, self._child_wakeup, *self._clients.values()):
            other.close()
        if self._forker is not None:
            self._forker.leave()

    def _reap(self) -> None:
        # One signal may stand for several children.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._supervisors:
                self._supervisors.discard(pid)
                continue
            # A worker is a child of this process only if its supervisor has ended, perhaps without a report.
            self._broadcast({"ended": pid, "status": status})
            if self._forker is not None:
                self._forker.note_end(pid, status)

    def tell(self, problem: str) -> None:
        """Report to all agents why ranks do not start warm."""
        sys.stderr.write(f"{problem}\n")
        self._broadcast({"problem": problem})

    def _broadcast(self, message: dict[str, object]) -> None:
        line = json.dumps(message) + "\n"
        for client in list(self._clients.values()):
            try:
                client.send(line.encode(), socket.MSG_DONTWAIT)
            except BlockingIOError:
                # An agent that does not read now misses it; ranks that start cold report that themselves.
                pass
            except OSError:
                self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        """Forget a client. Its workers end by themselves, since their sockets are closed with the agent."""
        if self._clients.pop(client.fileno(), None) is not None:
            self._selector.unregister(client)
            client.close()


def _child_signals() -> tuple[socket.socket, int]:
    """Return a socket that becomes readable whenever a child has ended, and the descriptor of its other end."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    writing_fd = writing.detach()
    # Python writes to the wakeup descriptor only for signals that have a handler.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing_fd, warn_on_full_buffer=False)
    return reading, writing_fd


def serve(
    listener: socket.socket,
    work: Callable[[socket.socket], None],
    *,
    forker: Callable[[ForkServer], Forker] | None = None,
) -> None:
    """Fork processes that call `work` until the last client has left; then remove the socket and its neighbours.

    `forker` creates another process that may fork in this one's place.
    """
    path = listener.getsockname()
    adopt_orphans(True)
    try:
        ForkServer(listener, work, forker).serve()
    finally:
        for name in ("fork.pid", "fork.warm"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(os.path.dirname(path), name))
        # A directory that another agent or job still uses stays.
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(os.path.dirname(path))
            os.rmdir(os.path.dirname(os.path.dirname(path)))


def tell_failure(listener: socket.socket, problem: str) -> None:
    """Tell the first client why this server cannot serve."""
    listener.settimeout(_TELLING_S)
    with contextlib.suppress(OSError):  # it has left
        client, _ = listener.accept()
        with client:
            client.sendall((json.dumps({"failed": problem}) + "\n").encode())
