"""A warm process that has imported everything a worker needs, and forks workers on request.

Importing torch and transformers takes seconds, a fork milliseconds. The agents of one user and job on one
machine share a fork server. It listens on a UNIX socket; a client sends one byte with a socket as ancillary
data, and the forked worker speaks to its agent through that socket. Answers are frames of two unsigned
integers: (FORKED, pid), and (pid, wait status) when the worker is gone.

The server runs a single thread and no torch operation, so that forking is safe; it ends when its last client
has left.

Rejected: Python's own fork server (`multiprocessing.forkserver`). It belongs to the process that started it and ends
with it, so agents could not share one, and a worker's parent would end with the first of them. Starting workers as
processes of their own needs no server, but costs the seconds of the imports each time: a worker that is killed should
be back in a fraction of one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable

from .imports import quick_imports

ANSWER = struct.Struct(">II")
FORKED = 0
"""The first integer of the answer to a request; no process has this id."""

_IDLE_TIMEOUT_S = 20.0
_EXIT_LISTENER_TAKEN = 3
_REST_S = 0.1


class _ForkServer:
    def __init__(
        self, listener: socket.socket, work: Callable[[socket.socket], None], between: Callable[[], float | None]
    ) -> None:
        """`work` is what a forked process does, with its agent's socket; it never returns.

        `between` is called between requests, and returns after how many seconds it wants to be again.
        """
        self._listener = listener
        self._work = work
        self._between = between
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._child_wakeup = _child_signals()
        self._selector.register(self._child_wakeup, selectors.EVENT_READ)
        self._clients: dict[int, socket.socket] = {}
        self._client_of: dict[int, socket.socket] = {}

    def serve(self) -> None:
        """Serve until no client is left."""
        while True:
            events = self._selector.select(self._between() if self._clients else _IDLE_TIMEOUT_S)
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
            if not self._clients and not self._client_of:
                return

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:  # the client is gone, or there are no descriptors left: others still need this server
            sys.stderr.write(f"the fork server cannot take a client in: {error.strerror}\n")
            time.sleep(_REST_S)
            return
        self._clients[client.fileno()] = client
        self._selector.register(client, selectors.EVENT_READ)

    def _answer(self, client: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(client, 1, 1)
        except OSError:
            data, descriptors = b"", []
        if not data or not descriptors:
            self._drop(client)
            return
        pid = os.fork()
        if pid == 0:
            self._become_worker(descriptors[0])
        os.close(descriptors[0])
        self._client_of[pid] = client
        self._tell(client, FORKED, pid)

    def _become_worker(self, descriptor: int) -> None:
        self._selector.close()
        for other in (self._listener, self._child_wakeup, *self._clients.values()):
            other.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _leave_ends_to_agents()
        try:
            self._work(socket.socket(fileno=descriptor))
        except BaseException:  # noqa: BLE001  nobody else tells of it
            traceback.print_exc()
        finally:
            os._exit(1)  # whatever it was: what comes after this is the server's

    def _reap(self) -> None:
        while self._client_of:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            client = self._client_of.pop(pid, None)
            if client is not None:
                self._tell(client, pid, status)

    def _tell(self, client: socket.socket, first: int, second: int) -> None:
        try:
            client.sendall(ANSWER.pack(first, second))
        except OSError:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        """Forget a client. Its workers end by themselves: their sockets are closed with the agent."""
        if self._clients.pop(client.fileno(), None) is not None:
            self._selector.unregister(client)
            client.close()


def _child_signals() -> socket.socket:
    """A socket that becomes readable whenever a child has ended."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    writing_fd = writing.detach()
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing_fd, warn_on_full_buffer=False)
    return reading


def _leave_ends_to_agents() -> None:
    """Ignore what reaches all processes at once: a terminal's Ctrl-C, and the notice that Slurm gives a whole step.

    The agent is told as well, and knows what has to be done before its workers may end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Serve on the inherited listening socket whose descriptor is the first argument."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    _leave_ends_to_agents()
    _warm_up()
    gc.collect()
    gc.freeze()
    serve(listener, _be_worker)


def serve(
    listener: socket.socket,
    work: Callable[[socket.socket], None],
    *,
    between: Callable[[], float | None] = lambda: None,
) -> None:
    """Fork processes that do `work` until the last client has left; then remove the socket, and what lies beside it.

    `between` is called between requests, and returns after how many seconds it wants to be again; None for whenever.
    """
    path = listener.getsockname()
    try:
        _ForkServer(listener, work, between).serve()
    finally:
        for name in ("fork.pid", "fork.imports", "fork.warm"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(os.path.dirname(path), name))
        with contextlib.suppress(OSError):  # a directory that another agent or job still uses stays
            os.unlink(path)
            os.rmdir(os.path.dirname(path))
            os.rmdir(os.path.dirname(os.path.dirname(path)))


def _be_worker(sock: socket.socket) -> None:
    from .worker import run_worker

    run_worker(sock)


def _warm_up() -> None:
    """Import what a worker imports, without running a torch operation."""
    with quick_imports():
        import oobleck.training.process.worker  # noqa: F401


if __name__ == "__main__":
    main()
