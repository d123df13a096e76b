"""Where to listen; accepts connections, up to a limit, and survives a lack of descriptors."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

_log = logging.getLogger("oobleck.listening")

# `accept` fails with these if the process has no descriptors left, which passes. Like trio's `serve_listeners`, we
# pause and continue, but log one line instead of a traceback per attempt.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST_S = 0.1


def listen_at(path: Path, backlog: int) -> socket.socket:
    """Listen on a UNIX socket that only its user can reach, in place of any other socket there. Raises OSError."""
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        # A socket that does not listen yet refuses connections, so none is made before the mode is set.
        path.chmod(0o600)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


async def listen_at_address(address: str, backlog: int) -> trio.SocketListener:
    """Listen at a free port of an address or a host name of this machine. Raises OSError."""
    family = (await trio.socket.getaddrinfo(address, None, type=socket.SOCK_STREAM))[0][0]
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        await sock.bind((address, 0))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return trio.SocketListener(sock)


async def accept(listener: trio.SocketListener) -> trio.SocketStream:
    """Wait for a client, also through a lack of descriptors, which is logged once."""
    is_logged = False
    while True:
        try:
            return await listener.accept()
        except OSError as error:
            if error.errno not in _SHORTAGES:
                raise
            if not is_logged:
                is_logged = True
                _log.warning("no client can be accepted: %s; raise `ulimit -n` if this lasts", error.strerror)
            await trio.sleep(_REST_S)


async def serve_clients(
    answer: Callable[[trio.SocketStream], Awaitable[bytes]],
    listeners: Sequence[trio.SocketListener],
    *,
    max_clients: int,
    timeout_s: float,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer each client within `timeout_s` and in its own task, at most `max_clients` at a time, until cancelled."""
    room = trio.Semaphore(max_clients)

    async def serve(stream: trio.SocketStream) -> None:
        try:
            async with stream:
                with trio.move_on_after(timeout_s):
                    await stream.send_all(await answer(stream))
        except trio.BrokenResourceError:
            _log.debug("a client went away before its answer")
        finally:
            room.release()

    async def accept_all(listener: trio.SocketListener) -> None:
        async with listener:
            while True:
                # Callers beyond the limit wait in the kernel's queue, without a descriptor or a task of ours.
                await room.acquire()
                clients.start_soon(serve, await accept(listener))

    async with trio.open_nursery() as clients:
        for listener in listeners:
            clients.start_soon(accept_all, listener)
        task_status.started(list(listeners))


async def receive_until(stream: trio.SocketStream, mark: bytes, *, most_bytes: int) -> bytes:
    """Receive until `mark` has arrived, the stream has ended, or more than `most_bytes` have arrived."""
    received = bytearray()
    while mark not in received and len(received) <= most_bytes:
        data = await stream.receive_some(4096)
        if not data:
            break
        received += data
    return bytes(received)
