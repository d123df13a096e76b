"""Where asyncssh meets trio: the one file that knows of asyncio.

asyncssh runs on a loop of trio-asyncio, inside the trio thread. Its coroutines are awaited through
`aio_as_trio`; byte streams use its callbacks directly, which may poke trio's primitives because they run in the
same thread, so no asyncio task is spent on a message.

Rejected: the `ssh` program. It is a process for each node, whose reasons to fail are text for people, and which gives
no byte stream to a socket on the other side without a helper there. And asyncio for all of the master: nurseries, and
cancelling that reaches everything, are what its failure paths rest on.

Importing trio-asyncio replaces the process's asyncio policy, so nothing but the SSH side of the master imports
this.
"""

from __future__ import annotations

import logging
import operator
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import asyncssh
import trio
import trio_asyncio

from .login_shell import Preamble

T = TypeVar("T")

_RECEIVE_HIGH_BYTES = 1 << 20
"""Above this many unread bytes the peer is asked to pause."""

_ERRORS_KEPT_BYTES = 4096

open_ssh_loop = trio_asyncio.open_loop
"""An async context manager: SSH works within it."""

logging.getLogger("asyncssh").setLevel(logging.WARNING)


async def await_asyncio(function: Callable[..., Awaitable[T]], *arguments: object, **options: object) -> T:
    """Await an asyncio coroutine function from trio; cancelling cancels it there."""
    result: T = await trio_asyncio.aio_as_trio(function)(*arguments, **options)
    return result


async def run_on(
    function: Callable[..., Awaitable[T]], connection: socket.socket, *arguments: object, **options: object
) -> T:
    """Await a function of asyncssh that begins a connection on a socket; where it fails, the socket is closed."""
    try:
        return await await_asyncio(function, connection, *arguments, **options)
    except BaseException:
        connection.close()
        raise


def call_later(delay_s: float, function: Callable[[], None]) -> None:
    """Have a function called later, unless the loop is closed by then."""
    trio_asyncio.current_loop.get().call_later(delay_s, function)


def awaitable_by_asyncio(function: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Make a trio coroutine function into one that asyncio code may await."""
    wrapped: Callable[..., Awaitable[None]] = trio_asyncio.trio_as_aio(function)
    return wrapped


class _Turn:
    """Taken by one task at a time, with every message: a generator as context manager would cost more."""

    def __init__(self, complaint: str) -> None:
        self._complaint = complaint
        self._is_taken = False

    def __enter__(self) -> None:
        if self._is_taken:
            raise trio.BusyResourceError(self._complaint)
        self._is_taken = True

    def __exit__(self, *error: object) -> None:
        self._is_taken = False


class SSHStream(trio.abc.HalfCloseableStream, asyncssh.SSHUNIXSession[bytes]):
    """A forwarded UNIX socket as a trio stream, with back-pressure both ways."""

    def __init__(self, hear: Callable[[], None] = lambda: None) -> None:
        """`hear` is called whenever bytes come."""
        self._hear = hear
        self._channel: asyncssh.SSHUNIXChannel[bytes] | None = None
        self._unread = bytearray()
        self._readable = trio.Event()
        self._writable = trio.Event()
        self._writable.set()
        self._is_reading_paused = False
        self._has_peer_ended = False
        self._has_sent_eof = False
        self._is_lost = False
        self._is_closed = False
        self._sending = _Turn("another task is sending")
        self._receiving = _Turn("another task is receiving")

    # --- called by asyncssh ----------------------------------------------------------------------------------

    def connection_made(self, chan: asyncssh.SSHUNIXChannel[bytes]) -> None:
        self._channel = chan

    def data_received(self, data: bytes, datatype: object = None) -> None:
        self._hear()
        self._unread += data
        self._readable.set()
        if len(self._unread) > _RECEIVE_HIGH_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self._open_channel.pause_reading()

    def eof_received(self) -> bool:
        self._has_peer_ended = True
        self._readable.set()
        return True  # our direction stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._readable.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable = trio.Event()

    def resume_writing(self) -> None:
        self._writable.set()

    # --- called from trio --------------------------------------------------------------------------------------

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes; b"" at the end. Raises BrokenResourceError when the connection is lost before it."""
        if max_bytes is not None and operator.index(max_bytes) < 1:  # a TypeError for what is no whole number
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 1")
        with self._receiving:
            if self._unread or self._has_peer_ended:  # else waiting is the checkpoint: two would wake the task twice
                await trio.lowlevel.checkpoint()
            while not self._unread:
                if self._is_closed:
                    raise trio.ClosedResourceError
                if self._has_peer_ended:
                    return b""
                if self._is_lost:
                    raise trio.BrokenResourceError("the SSH connection is lost")
                self._readable = trio.Event()
                await self._readable.wait()
            if self._is_closed:
                raise trio.ClosedResourceError
            return self._take(max_bytes or len(self._unread))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, waiting while the peer takes nothing."""
        with self._sending:
            self._check_writable()
            await trio.lowlevel.checkpoint_if_cancelled()  # waiting at the end lets others run
            if data:
                try:
                    self._open_channel.write(bytes(data))
                except OSError as error:  # asyncssh knows of the loss, and has not told us yet
                    raise trio.BrokenResourceError("the SSH connection is lost") from error
            await self._writable.wait()
            self._check_writable()

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            self._check_writable()
            await trio.lowlevel.checkpoint()
            await self._writable.wait()
            if self._is_closed:
                raise trio.ClosedResourceError

    async def send_eof(self) -> None:
        with self._sending:
            if self._is_closed:
                raise trio.ClosedResourceError
            await trio.lowlevel.checkpoint()
            if not self._has_sent_eof and not self._is_lost:
                self._has_sent_eof = True
                with suppress(OSError):  # closed already, which the next call will meet
                    self._open_channel.write_eof()

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._readable.set()
            self._writable.set()
            if self._channel is not None and not self._is_lost:
                self._channel.close()
        await trio.lowlevel.checkpoint()

    @property
    def _open_channel(self) -> asyncssh.SSHUNIXChannel[bytes]:
        assert self._channel is not None
        return self._channel

    def _take(self, max_bytes: int) -> bytes:
        data = bytes(self._unread[:max_bytes])
        del self._unread[:max_bytes]
        if self._is_reading_paused and len(self._unread) < _RECEIVE_HIGH_BYTES // 2:
            self._is_reading_paused = False
            self._open_channel.resume_reading()
        return data

    def _check_writable(self) -> None:
        if self._is_closed or self._has_sent_eof:
            raise trio.ClosedResourceError
        if self._is_lost:
            raise trio.BrokenResourceError("the SSH connection is lost")


class SSHCommandStream(SSHStream):
    """The input and output of a marked command on a node as a trio stream; the end of what it says to stderr is kept.

    `preamble` is what the login shell printed before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._errors = bytearray()
        self.preamble = Preamble()
        self.exit_status: int | None = None

    @property
    def errors(self) -> str:
        """The last that the command said to stderr."""
        return self._errors.decode(errors="replace").strip()

    # --- called by asyncssh ----------------------------------------------------------------------------------

    def data_received(self, data: bytes, datatype: object = None) -> None:
        if datatype is None:
            if output := self.preamble.strip(data):
                super().data_received(output)
            return
        self._errors += data
        del self._errors[:-_ERRORS_KEPT_BYTES]

    def exit_status_received(self, status: int) -> None:
        self.exit_status = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self.exit_status = -1
