"""The server side of the run's local control socket, for the master; `control_client` has the protocol.

The file system decides who can reach the socket: its directory has mode 0700, and the socket itself 0600.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from oobleck.errors import OobleckError, PeerError, UsageError
from oobleck.json_table import to_json

from .control_client import ControlRequest, NoActiveRun, StatusRequest, decode_request, encode_error, request
from .files import MAX_SOCKET_PATH_BYTES
from .listening import listen_at, receive_until, serve_clients

Handle = Callable[[ControlRequest], Awaitable[Mapping[str, object]]]
"""Answers a request with values for JSON; an OobleckError becomes an error response."""

MAX_REQUEST_BYTES = 4096
_CLIENT_TIMEOUT_S = 10.0
_MAX_CLIENTS = 32


async def serve_control(
    path: Path, handle: Handle, *, task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer requests at `path` until cancelled. Raises UsageError if a living run listens there."""
    # To ask whether another run listens takes up to two seconds, so a thread does it.
    listening = trio.socket.from_stdlib_socket(await trio.to_thread.run_sync(_listen, path))
    try:
        await serve_clients(
            partial(_answer, handle=handle),
            [trio.SocketListener(listening)],
            max_clients=_MAX_CLIENTS,
            timeout_s=_CLIENT_TIMEOUT_S,
            task_status=task_status,
        )
    finally:
        path.unlink(missing_ok=True)  # noqa: ASYNC240  a local name


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise UsageError(f"{path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes of a socket's path")
    if path.is_socket() and _is_alive(path):
        raise UsageError(f"another run listens at {path}")
    # This replaces the socket of a dead run.
    return listen_at(path, _MAX_CLIENTS)


def _is_alive(path: Path) -> bool:
    with suppress(OobleckError):
        try:
            request(path, StatusRequest(), timeout_s=2.0)
        # A broken or late answer comes from a living process as well.
        except NoActiveRun:
            return False
    return True


async def _answer(stream: trio.SocketStream, *, handle: Handle) -> bytes:
    received = await receive_until(stream, b"\n", most_bytes=MAX_REQUEST_BYTES)
    line, newline, _ = received.partition(b"\n")
    try:
        if len(received) > MAX_REQUEST_BYTES:
            raise PeerError(f"a request is at most {MAX_REQUEST_BYTES} bytes long")
        if not newline:
            raise PeerError("the request has no end of line")
        return to_json({"ok": dict(await handle(decode_request(line)))}).encode() + b"\n"
    except OobleckError as error:
        return encode_error(error)
