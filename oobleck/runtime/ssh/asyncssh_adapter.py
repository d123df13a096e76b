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
from typing import Final, TypeVar

import asyncssh
import trio
import trio_asyncio

T = TypeVar("T")

_RECEIVE_HIGH_BYTES = 1 << 20  # above this many unread bytes the peer is asked to pause

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


_MARK: Final = b"oobleck-begins-here\n"
_KEPT_BYTES: Final = 4096


def marked(command: str) -> str:
    """Return a command that prints the mark first. Its own text does not contain the mark, which a shell may repeat."""
    return f"echo oobleck-'begins'-here; {command}"


class Preamble:
    """Takes the output of a marked command, and keeps the end of what came before the mark.

    sshd hands every command to the user's login shell, which may be any, and reads its start files first, which greet
    on the same stream. So a command begins by printing a mark, in words that all shells understand, and what comes
    before the mark is not the command's.
    """

    def __init__(self) -> None:
        self._before = bytearray()
        self.has_ended = False
        """Whether the mark has come: the command has begun."""

    @property
    def text(self) -> str:
        """What was printed before the command."""
        return self._before.decode(errors="replace").strip()

    def strip(self, data: bytes) -> bytes:
        """Return what of the next bytes is the command's own."""
        if self.has_ended:
            return data
        self._before += data
        at = self._before.find(_MARK)
        if at < 0:
            del self._before[:-_KEPT_BYTES]
            return b""
        self.has_ended = True
        output = bytes(self._before[at + len(_MARK) :])
        del self._before[at:]
        return output

    def as_cause(self) -> str:
        """What people are told of it where something went wrong: its last line, or nothing."""
        return f"; its login shell printed {self.text.splitlines()[-1]!r}" if self.text else ""


_RESTING_S = 60.0


class Keepalive:
    """Has asyncssh ask whether the other side is there while it says nothing, and only then.

    asyncssh sets a timer for its next question again with each packet that comes, and each of these timers wakes the
    process once more when its time has come, although it is cancelled. With agents that send heartbeats this costs as
    much as a fifth of the master's time. So asyncssh asks nothing while an agent is heard, and one look in each
    interval sees whether it still is. Who falls silent is given up within one interval of when it would be otherwise.
    """

    def __init__(self, connection: asyncssh.SSHClientConnection, *, interval_s: float, count_max: int) -> None:
        """asyncssh asks already: every `interval_s`, and `count_max` times in vain before the connection is lost."""
        self._connection = connection
        self._interval_s = interval_s
        self._count_max = count_max
        self._is_asking = True
        self._is_resting = False
        self._is_heard = False

    def hear(self) -> None:
        """Something has come. Called by asyncssh."""
        self._is_heard = True
        if self._is_asking and not self._is_resting and self._interval_s:
            self._is_asking = False
            self._connection.set_keepalive(interval=0)
            call_later(self._interval_s, self._look)

    def rest(self, is_resting: bool) -> None:
        """Ask seldom, while the other side is heard by another way: often enough for a firewall."""
        self._is_resting = is_resting
        self._ask(_RESTING_S if is_resting else self._interval_s, self._count_max)

    def _look(self) -> None:
        if self._is_asking or self._connection.is_closed():
            return
        if self._is_heard:
            self._is_heard = False
            call_later(self._interval_s, self._look)
        else:
            self._ask(self._interval_s, self._count_max - 1)  # one interval has passed already

    def _ask(self, interval_s: float, count_max: int) -> None:
        self._is_asking = True
        self._connection.set_keepalive(interval=interval_s, count_max=count_max)
