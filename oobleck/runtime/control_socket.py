"""The server side of the run's local control socket, for the master; `control_client` has the protocol.

The file system decides who can reach the socket: its directory has mode 0700, and the socket itself 0600.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import trio

from oobleck.errors import OobleckError, PeerError, UsageError
from oobleck.json_table import to_json

from .control_client import ControlRequest, NoActiveRun, StatusRequest, decode_request, encode_error, request
from .files import MAX_SOCKET_PATH_BYTES
from .listening import listen_at, serve_clients

logger = logging.getLogger(__name__)

Handle = Callable[[ControlRequest], Awaitable[Mapping[str, object]]]
"""Answers a request with values for JSON; an OobleckError becomes an error response."""

MAX_REQUEST_BYTES = 4096
_CLIENT_TIMEOUT_S = 10.0
_MAX_CLIENTS = 32


async def serve_control(
    path: Path, handle: Handle, *, task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer requests at `path` until cancelled, then remove the socket.

    Each client has its own task and 10 seconds, so that a slow one does not delay others. The socket of a dead run is
    replaced. Raises UsageError if a living run listens there.
    """
    listening = trio.socket.from_stdlib_socket(await trio.to_thread.run_sync(_listen, path))
    serve_client = partial(_serve_client, handle=handle)
    listeners = [trio.SocketListener(listening)]
    try:
        await serve_clients(serve_client, listeners, max_clients=_MAX_CLIENTS, task_status=task_status)
    finally:
        path.unlink(missing_ok=True)  # noqa: ASYNC240  a local name


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise UsageError(f"{path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes of a socket's path")
    if path.is_socket() and _is_alive(path):
        raise UsageError(f"another run listens at {path}")
    return listen_at(path, _MAX_CLIENTS)


def _is_alive(path: Path) -> bool:
    try:
        request(path, StatusRequest(), timeout_s=2.0)
    except NoActiveRun:
        return False
    except OobleckError:
        return True
    return True


async def _serve_client(stream: trio.SocketStream, *, handle: Handle) -> None:
    async with stream:
        with trio.move_on_after(_CLIENT_TIMEOUT_S):
            try:
                await stream.send_all(await _answer(stream, handle))
            except trio.BrokenResourceError:
                logger.debug("a control client went away before its answer")


async def _answer(stream: trio.SocketStream, handle: Handle) -> bytes:
    try:
        asked = decode_request(await _read_line(stream))
        return to_json({"ok": dict(await handle(asked))}).encode() + b"\n"
    except OobleckError as error:
        return encode_error(error)


async def _read_line(stream: trio.SocketStream) -> bytes:
    received = bytearray()
    while b"\n" not in received:
        chunk = await stream.receive_some(MAX_REQUEST_BYTES)
        received += chunk
        if len(received) > MAX_REQUEST_BYTES:
            raise PeerError(f"a request is at most {MAX_REQUEST_BYTES} bytes long")
        if not chunk:
            raise PeerError("the request has no end of line")
    return bytes(received.partition(b"\n")[0])
