"""Accepting connections, whatever clients do: as many as there is room for, and none that ends the process.

A process that runs out of descriptors learns so from `accept`, for a client that did nothing wrong. That passes: trio's
own `serve_listeners` takes a rest and continues, and so is it done here, but with one line in the log, not a traceback
for each attempt; and beyond a number of clients none is accepted before another has left.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

_log = logging.getLogger("oobleck.listening")

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST_S = 0.1


def listen_at(path: Path, backlog: int) -> socket.socket:
    """Listen on a UNIX socket that its user alone can reach; one that is there is replaced. Raises OSError."""
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


async def accept(listener: trio.SocketListener) -> trio.SocketStream:
    """Wait for a client; through a lack of descriptors, too, which is said once."""
    is_said = False
    while True:
        try:
            return await listener.accept()
        except OSError as error:
            if error.errno not in _SHORTAGES:
                raise
            if not is_said:
                is_said = True
                _log.warning("no client can be taken in: %s; raise `ulimit -n`, if it stays so", error.strerror)
            await trio.sleep(_REST_S)


async def serve_clients(
    serve: Callable[[trio.SocketStream], Awaitable[object]],
    listeners: Sequence[trio.SocketListener],
    *,
    max_clients: int,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve clients, each in a task of its own, until cancelled; further ones wait until somebody has left."""
    room = trio.Semaphore(max_clients)

    async def serve_and_leave(stream: trio.SocketStream) -> None:
        try:
            await serve(stream)
        finally:
            room.release()

    async def accept_all(listener: trio.SocketListener) -> None:
        async with listener:
            while True:
                await room.acquire()
                clients.start_soon(serve_and_leave, await accept(listener))

    async with trio.open_nursery() as clients:
        for listener in listeners:
            clients.start_soon(accept_all, listener)
        task_status.started(list(listeners))
