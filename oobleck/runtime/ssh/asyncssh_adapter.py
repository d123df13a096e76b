"""Where asyncssh meets trio: the only file that knows asyncio.

asyncssh runs on a trio-asyncio loop inside the trio thread. Its coroutines are awaited through `await_asyncio`. Byte
streams use its callbacks, which run in the same thread and so may call trio's primitives: a message costs no asyncio
task.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

import asyncssh
import trio

# This import replaces the process's asyncio policy, so only the SSH side of the master imports this module.
import trio_asyncio

T = TypeVar("T")

_RECEIVE_HIGH_BYTES = 1 << 20  # above this many unread bytes the peer is asked to pause
_KEPT_BYTES: Final = 4096
_MARK: Final = b"oobleck-begins-here\n"
_ENDING_S: Final = 1.0
_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 2.0
_RESTING_S: Final = 60.0  # often enough for a firewall to keep the connection

# Rejected: the `ssh` program, because it costs a process per node, reports failures as text for people, and gives no
# byte stream to a remote socket without a helper there. Also asyncio for the whole master: its failure paths rest on
# nurseries and on cancellation that reaches everything.
logging.getLogger("asyncssh").setLevel(logging.WARNING)


@asynccontextmanager
async def open_ssh_loop() -> AsyncIterator[None]:
    """Within it, SSH works."""
    async with trio_asyncio.open_loop() as loop:
        loop.set_default_executor(_Abandoning())
        try:
            yield
        finally:
            # A login goes on although its connection was closed, and would fail in asyncssh's own code.
            with trio.CancelScope(shield=True), trio.move_on_after(_ENDING_S):
                await loop.synchronize()
                while tasks := asyncio.all_tasks(loop):
                    for task in tasks:
                        task.cancel()
                    await loop.synchronize()


class _Abandoning(trio_asyncio.TrioExecutor):  # type: ignore[misc]  # trio-asyncio has no types
    """Runs asyncio's blocking calls, which read ssh's config and resolve names, and abandons those that are cancelled.

    trio-asyncio's own executor waits for the thread instead, so that a timeout would last as long as the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places = trio.CapacityLimiter(math.inf)  # the login gate limits how many connect at once

    async def submit(self, func: Callable[..., T], *args: object) -> T:
        # An abandoned thread keeps its place in a limiter, and a name server that is gone must cost others none.
        return await trio.to_thread.run_sync(partial(func, *args), abandon_on_cancel=True, limiter=self._places)


async def await_asyncio(function: Callable[..., Awaitable[T]], *arguments: object, **options: object) -> T:
    """Await an asyncio coroutine function from trio; cancellation reaches it."""

    async def call() -> T:
        return await function(*arguments, **options)

    task: asyncio.Task[T] = trio_asyncio.current_loop.get().create_task(call())
    ended = trio.Event()
    task.add_done_callback(lambda _: ended.set())
    try:
        await ended.wait()
    except (trio.Cancelled, KeyboardInterrupt) as reason:
        # The loop loses a request that comes as a thread ends. trio-asyncio's `aio_as_trio` asks only once, and the
        # coroutine would then outlast every timeout around it.
        with trio.CancelScope(shield=True):
            wait_s = _FIRST_WAIT_S
            while not ended.is_set():
                task.cancel()
                with trio.move_on_after(wait_s):
                    await ended.wait()
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)  # what it does to clean up hears each request, too
        if task.cancelled() or isinstance(reason, KeyboardInterrupt):
            raise
    return task.result()


async def run_on(
    function: Callable[..., Awaitable[T]], connection: socket.socket, *arguments: object, **options: object
) -> T:
    """Await an asyncssh function that begins a connection on a socket; close the socket if it fails."""
    try:
        return await await_asyncio(function, connection, *arguments, **options)
    except BaseException:
        connection.close()
        raise


def awaitable_by_asyncio(function: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Turn a trio coroutine function into one that asyncio code may await."""
    wrapped: Callable[..., Awaitable[None]] = trio_asyncio.trio_as_aio(function)
    return wrapped


class _OneTask:
    """Admits one task at a time."""

    # Every message enters one, and a context manager made from a generator costs more.
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

    _channel: asyncssh.SSHUNIXChannel[bytes]

    def __init__(self, note_traffic: Callable[[], None] = lambda: None) -> None:
        self._note_traffic = note_traffic
        self._unread = bytearray()
        self._readable = trio.Event()
        self._writable = trio.Event()
        self._writable.set()
        self._is_reading_paused = False
        self._has_peer_ended = False
        self._has_sent_eof = False
        self._is_lost = False
        self._is_closed = False
        self._sending = _OneTask("another task is sending")
        self._receiving = _OneTask("another task is receiving")

    # --- called by asyncssh ----------------------------------------------------------------------------------

    def connection_made(self, chan: asyncssh.SSHUNIXChannel[bytes]) -> None:
        self._channel = chan

    def data_received(self, data: bytes, datatype: object = None) -> None:
        self._note_traffic()
        self._unread += data
        self._readable.set()
        if len(self._unread) > _RECEIVE_HIGH_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self._channel.pause_reading()

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
        """Wait for bytes; b"" at the end. Raises BrokenResourceError if the connection is lost before the end."""
        if max_bytes is not None and operator.index(max_bytes) < 1:  # index() raises TypeError for non-integers
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 1")
        with self._receiving:
            if self._unread or self._has_peer_ended:  # else the wait below is the checkpoint; two would wake us twice
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
            data = bytes(self._unread[:max_bytes])
            del self._unread[:max_bytes]
            # Just below the limit, reading would pause and resume with every message.
            if self._is_reading_paused and len(self._unread) < _RECEIVE_HIGH_BYTES // 2:
                self._is_reading_paused = False
                self._channel.resume_reading()
            return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, and wait while the peer accepts nothing."""
        with self._sending:
            self._check_writable()
            await trio.lowlevel.checkpoint_if_cancelled()  # the wait at the end lets other tasks run
            if data:
                try:
                    self._channel.write(bytes(data))
                except OSError as error:  # asyncssh knows about the loss but has not called connection_lost yet
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
                with suppress(OSError):  # already closed, which the next call reports
                    self._channel.write_eof()

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._readable.set()
            self._writable.set()
            if not self._is_lost:
                self._channel.close()
        await trio.lowlevel.checkpoint()

    def _check_writable(self) -> None:
        if self._is_closed or self._has_sent_eof:
            raise trio.ClosedResourceError
        if self._is_lost:
            raise trio.BrokenResourceError("the SSH connection is lost")


class SSHCommandStream(SSHStream):
    """The input and output of a marked command on a node as a trio stream, without the login shell's `preamble`."""

    def __init__(self) -> None:
        super().__init__()
        self._errors = bytearray()
        self.preamble = Preamble()
        self.exit_status: int | None = None
        self._has_exited = trio.Event()

    async def wait(self) -> int | None:
        """Wait for the command's exit status, which may come after its output; None if the connection is lost."""
        await self._has_exited.wait()
        return self.exit_status

    @property
    def errors(self) -> str:
        return self._errors.decode(errors="replace").strip()

    # --- called by asyncssh ----------------------------------------------------------------------------------

    def data_received(self, data: bytes, datatype: object = None) -> None:
        if datatype is None:
            if output := self.preamble.strip(data):
                super().data_received(output)
            return
        self._errors += data
        del self._errors[:-_KEPT_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._has_exited.set()

    def exit_status_received(self, status: int) -> None:
        self.exit_status = status
        self._has_exited.set()

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self.exit_status = -1
        self._has_exited.set()


def marked(command: str) -> str:
    # sshd hands every command to the user's login shell, whose start files may print to the same stream. So a command
    # first prints a mark, in words that all shells understand, and its own output begins after the mark. A shell may
    # echo this text; the quotes keep the mark itself out of it.
    return f"echo oobleck-'begins'-here; {command}"


class Preamble:
    """Separates what the login shell prints from the output of a marked command."""

    def __init__(self) -> None:
        self._before = bytearray()
        self.has_ended = False

    def strip(self, data: bytes) -> bytes:
        """Return the part of the next bytes that belongs to the command; keeps the end of what precedes it."""
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

    @property
    def text(self) -> str:
        return self._before.decode(errors="replace").strip()

    def as_cause(self) -> str:
        """Return its last line as the end of an error message, or an empty string."""
        return f"; its login shell printed {self.text.splitlines()[-1]!r}" if self.text else ""


class Keepalive:
    """Has asyncssh probe the other side only while that side is silent."""

    def __init__(self, connection: asyncssh.SSHClientConnection, *, interval_s: float, count_max: int) -> None:
        """asyncssh already probes every `interval_s`, and gives up after `count_max` unanswered probes."""
        self._connection = connection
        self._interval_s = interval_s
        self._count_max = count_max
        self._is_probing = True
        self._is_resting = False
        self._has_traffic = False

    def note_traffic(self) -> None:
        """Note that bytes have arrived. Called by asyncssh."""
        self._has_traffic = True
        if self._is_probing and not self._is_resting and self._interval_s:
            # asyncssh sets its probe timer again with each packet that arrives, and each of these timers, although
            # cancelled, wakes the process once more when it is due. With agents that send heartbeats this costs up to a
            # fifth of the master's time. So asyncssh probes nothing while packets arrive.
            self._is_probing = False
            self._connection.set_keepalive(interval=0)
            self._check_later()

    def rest(self, is_resting: bool) -> None:
        """Probe rarely while other connections show that the node lives."""
        self._is_resting = is_resting
        self._probe(_RESTING_S if is_resting else self._interval_s, self._count_max)

    def _check_later(self) -> None:
        trio_asyncio.current_loop.get().call_later(self._interval_s, self._check)

    def _check(self) -> None:
        if self._is_probing or self._connection.is_closed():
            return
        if self._has_traffic:
            self._has_traffic = False
            self._check_later()
        else:
            # One silent interval has passed already, so the peer is given up at most one later than asyncssh would.
            self._probe(self._interval_s, self._count_max - 1)

    def _probe(self, interval_s: float, count_max: int) -> None:
        self._is_probing = True
        self._connection.set_keepalive(interval=interval_s, count_max=count_max)
