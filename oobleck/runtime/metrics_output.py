"""Outputs of a run's metrics: JSON lines, TensorBoard's event files if it is installed, and a Prometheus endpoint."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from oobleck.control.journal import JournalEntry, Metrics, MetricSample, StepDone
from oobleck.errors import UsageError
from oobleck.host.user_path import expand_user
from oobleck.json_table import to_json

from .files import MAX_SOCKET_PATH_BYTES, LineFile
from .listening import listen_at, receive_until, serve_clients

if TYPE_CHECKING:
    from .tensorboard_file import TensorBoardFile

_log = logging.getLogger("oobleck.metrics")

_CLIENT_TIMEOUT_S = 5.0
_MAX_CLIENTS = 32
_MAX_REQUEST_BYTES = 16_384
_HEAD_END = b"\r\n\r\n"
_PORT = re.compile(r"[0-9]{1,5}")
_KEPT_BYTES = 16 << 20
_BOARD_KEYS = ("loss", "grad_norm", "learning_rate", "step_time_s", "tokens_per_s", "mfu", "goodput", "nodes")


class MetricsOutput:
    """Writes a sample for each committed step, now or once a full disk has room."""

    def __init__(self, path: Path, *, past: Metrics | None = None, tensorboard: bool | None = None) -> None:
        """Append to `path`; `past` has earlier masters' entries; `tensorboard` None uses it if it is installed."""
        self.metrics = Metrics() if past is None else past
        self._path = path
        self._lines: LineFile | None = None
        self._has_board = find_spec("tensorboard") is not None if tensorboard is None else tensorboard
        self._board: TensorBoardFile | None = None
        self._num_boards = 0
        self._is_whole = True
        try:
            self._lines = LineFile(path, max_bytes=_KEPT_BYTES)
        except OSError as error:
            _log.warning("metrics %s: %s; the run continues without them", path, error.strerror)

    def apply(self, entry: JournalEntry) -> None:
        """Apply an entry, and write a sample if it commits a step."""
        self.metrics.apply(entry)
        if self._lines is not None and isinstance(entry, StepDone):
            self._write(self._lines, self.metrics.sample(entry.t_s))

    def restore(self) -> None:
        """Create a removed file again with its content. Raises OSError."""
        if self._lines is not None:
            self._lines.restore()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.flush()
            if missing := self._lines.num_missing:
                _log.warning("metrics %s: the samples of %d steps are missing", self._path, missing)
            self._lines.close()
            self._lines = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def _write(self, lines: LineFile, sample: MetricSample) -> None:
        values = sample.to_dict()
        lines.write(to_json(values).encode() + b"\n", is_minor=True)
        if lines.is_whole is not self._is_whole:
            self._is_whole = lines.is_whole
            problem = "" if lines.problem is None else f"{lines.problem.strerror}; samples are kept until there is room"
            _log.warning("metrics %s: %s", self._path, problem or "written again")
        # While the disk is full, each step would only leave another file with half a record.
        if self._has_board and self._is_whole:
            self._write_to_board({key: values[key] for key in _BOARD_KEYS}, sample.step)

    def _write_to_board(self, values: Mapping[str, object], step: int) -> None:
        try:
            from .tensorboard_file import TensorBoardFile
        except ImportError as error:  # an incomplete or incompatible installation must not end the run
            self._has_board = False
            _log.warning("TensorBoard's files are not written: it cannot be imported: %s", error)
            return

        known = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
        try:
            if self._board is None:
                self._num_boards += 1
                name = f"{os.getpid()}.{self._num_boards}" if self._num_boards > 1 else str(os.getpid())
                self._board = TensorBoardFile(self._path.with_name("tensorboard"), wall_s=time.time(), name=name)
            self._board.add(step, known, wall_s=time.time())
        except OSError as error:
            _log.warning("TensorBoard's files lack step %d: %s", step, error.strerror)
            # This file may end with half a record, so the next step begins another one.
            if self._board is not None:
                self._board.close()
                self._board = None


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """The address of the endpoint: a UNIX socket, or a port of one address of this machine, or of all."""

    path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0


def parse_metrics_address(text: str) -> MetricsAddress:
    """Parse `unix:PATH`, `PORT` (on the loopback interface) or `ADDRESS:PORT`. Raises UsageError."""
    if text.startswith("unix:"):
        path = expand_user(text.removeprefix("unix:")).absolute()
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise UsageError(f"--metrics: {path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes of a socket's path")
        return MetricsAddress(path=path)
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65_535:
        raise UsageError(f"--metrics: {text!r} is not unix:PATH, PORT or ADDRESS:PORT")
    if not _is_here(host):
        raise UsageError(
            f"--metrics: {host!r} is no address of this machine; write an IP address, as in 127.0.0.1:{port}, or "
            f"0.0.0.0:{port} for scrapers on other machines"
        )
    return MetricsAddress(host=host, port=int(port))


def _is_here(host: str) -> bool:
    """Whether this machine can listen at an address."""
    if host == "localhost":
        return True
    try:
        family = socket.AF_INET if ip_address(host).version == 4 else socket.AF_INET6
        with socket.socket(family) as tried:
            tried.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


async def serve_metrics(
    address: MetricsAddress,
    text: Callable[[], str],
    *,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer every HTTP request with `text()`, until cancelled. Raises UsageError if it cannot listen."""

    async def answer(stream: trio.SocketStream) -> bytes:
        head = await receive_until(stream, _HEAD_END, most_bytes=_MAX_REQUEST_BYTES)
        # The path is not read: whatever a client asks for, it gets the metrics.
        return _response(text()) if _HEAD_END in head and len(head) <= _MAX_REQUEST_BYTES else b""

    try:
        if address.path is None:
            listeners = await trio.open_tcp_listeners(address.port, host=address.host)
        else:
            listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(listen_at(address.path, _MAX_CLIENTS)))]
    except OSError as error:
        place = address.path or f"{address.host}:{address.port}"
        raise UsageError(f"--metrics: cannot listen on {place}: {error.strerror}") from error
    try:
        await serve_clients(
            answer, listeners, max_clients=_MAX_CLIENTS, timeout_s=_CLIENT_TIMEOUT_S, task_status=task_status
        )
    finally:
        if address.path is not None:
            address.path.unlink(missing_ok=True)


def _response(text: str) -> bytes:
    body = text.encode()
    head = (
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
