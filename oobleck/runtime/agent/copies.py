"""Copies of parts of states between nodes: from shared memory to shared memory, over a connection for each part.

    caller ── a nonce ──> listener                      both prove that they know the listener's ticket
           <── a nonce, proof ──
           ── proof, the part's head ──>
           <── nothing, or why it is refused ──
           ── its data ──>
           <── nothing, or what is wrong with it ──

A part that is mixed with others (`parity.py`) may have arrived in part before: then the listener says how many bytes.

The data is what the slot has, and is not encrypted, like what the script's own collectives send. Its checksums travel
in the head, and those of each chunk are compared as it arrives, so no damaged copy becomes valid.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import trio

from oobleck.control.protocol import CopyDoor, Mix
from oobleck.errors import CorruptCheckpoint, PeerError
from oobleck.runtime.listening import accept, listen_at_address
from oobleck.storage import CHUNK_BYTES, Layout, MappedFiles, Slot, scripts
from oobleck.wire import decode_json, encode_json

from .parity import Mixer, Refused

_NONCE_BYTES = 16
_PROOF_BYTES = 32
_HEAD = struct.Struct("<IIII")  # bytes of the note, the layout, the checksums, and of what it is mixed to
_HAVE = struct.Struct("<Q")
_MOST_HEAD_BYTES = 1 << 28
_TEXT = struct.Struct("<H")  # bytes of a text
_MOST_TEXT_BYTES = 1 << 12
MOST_SENDERS = 4
_WAIT_S = 20.0  # a side that neither sends nor reads for so long is gone
_GREETING_S = 5.0
_MOST_CALLERS = 64
_MOST_TAKERS = 16
_LOWER_EFFORT = 0x04  # RFC 8622: switches that know it serve all other traffic first
_BURST_S = 0.05
_SILENT_S = 4.0  # well below the time after which a side counts as gone


class NotCopied(Exception):
    """A part did not reach its target; `is_gone` if it was overwritten."""

    def __init__(self, reason: str, *, is_gone: bool = False) -> None:
        super().__init__(reason)
        self.is_gone = is_gone


class Pace:
    """Limits the rate of all senders of a node together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    @property
    def piece_bytes(self) -> int:
        """How much to send at a time, so that no sender is silent for long while all others wait for their turns."""
        return int(max(1, min(CHUNK_BYTES, self._bytes_per_s * _SILENT_S / MOST_SENDERS)))

    def wait(self, num_bytes: int) -> None:
        """Wait until this number of bytes may be sent; blocks the thread."""
        with self._lock:
            now_s = time.monotonic()
            # Time in which nothing was sent is not made up for, except for a moment of it.
            self._free_s = max(self._free_s, now_s - _BURST_S) + num_bytes / self._bytes_per_s
            wait_s = self._free_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)


def send_part(slot: Slot, door: CopyDoor, pace: Pace, mix: Mix | None = None) -> None:
    """Send a slot's part to a node, maybe to be mixed there; blocks the thread for O(size). Raises NotCopied."""
    sequence = slot.sequence
    if slot.sums is None:
        slot.sum()
    sums, note, layout = slot.sums, slot.note, slot.memory.layout.to_json()
    if sums is None or not slot.is_valid or slot.sequence != sequence:
        raise NotCopied("it was overwritten", is_gone=True)
    try:
        with slot.memory.path.open("rb") as file, socket.create_connection((door.host, door.port), _WAIT_S) as sock:
            _mark_as_background(sock)
            _prove(sock, door.ticket)
            mixed = b"" if mix is None else encode_json(mix)
            sizes = _HEAD.pack(len(note), len(layout), len(sums), len(mixed))
            sock.sendall(sizes + note + layout + sums + mixed)
            if refusal := _receive_text(sock):
                raise NotCopied(refusal)
            (have,) = (0,) if mix is None else _HAVE.unpack(_receive(sock, _HAVE.size))
            for start in range(slot.offset + have, slot.offset + len(slot.data), pace.piece_bytes):
                num_bytes = min(pace.piece_bytes, slot.offset + len(slot.data) - start)
                pace.wait(num_bytes)
                sock.sendfile(file, start, num_bytes)
            problem = _receive_text(sock)
    except (OSError, EOFError) as error:
        # The target notices data that changes under way, and hangs up.
        if slot.sequence != sequence:
            raise NotCopied("it was overwritten", is_gone=True) from error
        raise NotCopied(f"{door.host}:{door.port}: {error}") from error
    if slot.sequence != sequence:
        raise NotCopied("it was overwritten", is_gone=True)
    if problem:
        raise NotCopied(problem)


class CopyPort:
    """Takes in copies for a node. `run` must be running."""

    def __init__(self, files: MappedFiles, keeps: Callable[[], frozenset[str]]) -> None:
        """Copies go to `files`; the states that `keeps` names are not overwritten."""
        self._files = files
        self._keeps = keeps
        self._mixer = Mixer(files, keeps)
        self._ticket = secrets.token_bytes(_PROOF_BYTES)
        self._listener: trio.SocketListener | None = None
        self._receiving: set[str] = set()
        self._is_closed = threading.Event()
        self._room = trio.Semaphore(_MOST_CALLERS)
        self._takers = trio.CapacityLimiter(_MOST_TAKERS)

    async def listen(self, node: str, address: str) -> CopyDoor:
        """Listen at an address of this machine. Raises OSError."""
        self._listener = listener = await listen_at_address(address, _MOST_CALLERS)
        return CopyDoor(node=node, host=address, port=listener.socket.getsockname()[1], ticket=self._ticket)

    async def run(self) -> None:
        """Take in copies until cancelled."""
        assert self._listener is not None
        async with self._listener, trio.open_nursery() as nursery:
            while True:
                await self._room.acquire()
                nursery.start_soon(self._serve, await accept(self._listener))

    def close(self) -> None:
        """Take in no copy from now on, also none that is being received."""
        self._is_closed.set()

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            with trio.move_on_after(_GREETING_S) as greeting:
                is_known = await self._greet(stream)
            if greeting.cancelled_caught or not is_known:
                return
            # The thread has a descriptor of its own, which it may still use after a cancellation.
            sock = socket.socket(fileno=os.dup(stream.socket.fileno()))
            await trio.to_thread.run_sync(self._take, sock, abandon_on_cancel=True, limiter=self._takers)
        except (trio.BrokenResourceError, EOFError):
            pass  # the caller is gone, and calls again if it lives
        finally:
            self._room.release()
            await trio.aclose_forcefully(stream)

    async def _greet(self, stream: trio.SocketStream) -> bool:
        """Prove to know the ticket; return whether the caller does."""
        theirs, ours = await _exactly(stream, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        await stream.send_all(ours + _proof(self._ticket, b"listener", theirs + ours))
        return hmac.compare_digest(await _exactly(stream, _PROOF_BYTES), _proof(self._ticket, b"caller", theirs + ours))

    # --- in a thread -------------------------------------------------------------------------------------------------

    def _take(self, sock: socket.socket) -> None:
        with sock:
            sock.settimeout(_WAIT_S)
            try:
                sizes = _HEAD.unpack(_receive(sock, _HEAD.size))
                if sum(sizes) > _MOST_HEAD_BYTES:
                    raise PeerError(f"a head of {sum(sizes)} bytes")
                note, layout, sums, mixed = (_receive(sock, size) for size in sizes)
                if mixed:
                    wrong = self._mix(sock, scripts.PartHead(note, layout, sums), decode_json(Mix, mixed))
                else:
                    wrong = self._store(sock, note, Layout.from_json(layout), sums)
                _send_text(sock, wrong)
            except (OSError, EOFError):
                pass  # what has come of it stays invalid
            except (PeerError, CorruptCheckpoint) as error:
                with suppress(OSError):
                    _send_text(sock, str(error))

    def _store(self, sock: socket.socket, note: bytes, layout: Layout, sums: bytes) -> str:
        """Receive a part into a slot; return what is wrong. Raises OSError, EOFError and CorruptCheckpoint."""
        part = decode_json(scripts.PartNote, note)
        stem = scripts.copy_stem(part.rank, part.start)
        if self._is_closed.is_set():
            return "its node leaves"
        if stem in self._receiving:
            return "it is being received already"
        self._receiving.add(stem)
        try:
            slot = scripts.slot_for(self._files, stem, layout, self._keeps())
            if slot is None:
                return "it has no room beside what it keeps"
            if len(sums) != slot.sums_bytes:
                return f"{len(sums)} bytes of checksums, and {slot.sums_bytes} are needed"
            _send_text(sock, "")
            slot.begin()
            if wrong := _receive_data(sock, slot.data, struct.iter_unpack("<I", sums)):
                return f"{wrong} differ from their checksum"
            slot.store_sums(slot.sequence, sums)
            if self._is_closed.is_set():
                return "its node leaves"
            slot.seal(note)
        except OSError as error:
            if isinstance(error, TimeoutError | ConnectionError):
                raise
            return f"{self._files.directory}: {error.strerror}"
        finally:
            self._receiving.discard(stem)
        return ""

    def _mix(self, sock: socket.socket, head: scripts.PartHead, mix: Mix) -> str:
        """Receive a part into a mixture; return what is wrong. Raises OSError, EOFError and CorruptCheckpoint."""
        note, num_bytes = decode_json(scripts.PartNote, head.note), Layout.from_json(head.layout).size_bytes
        if self._is_closed.is_set():
            return "its node leaves"
        try:
            mixture, num_in = self._mixer.begin(note, head, mix, num_bytes)
        except Refused as refused:
            return str(refused)
        except OSError as error:
            return f"{self._files.directory}: {error.strerror}"
        wrong = ""
        try:
            _send_text(sock, "")
            sock.sendall(_HAVE.pack(num_in * CHUNK_BYTES))
            buffer = memoryview(bytearray(min(CHUNK_BYTES, num_bytes)))
            for start in range(num_in * CHUNK_BYTES, num_bytes, CHUNK_BYTES):
                chunk = buffer[: min(CHUNK_BYTES, num_bytes - start)]
                _receive_into(sock, chunk)
                if self._is_closed.is_set():
                    return "its node leaves"
                if wrong := self._mixer.take(mixture, note.rank, chunk):
                    return wrong
        finally:
            wrong = self._mixer.end(mixture, note.rank) or wrong
        return wrong


def _proof(ticket: bytes, whose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(ticket, whose + nonces, "sha256")


def _prove(sock: socket.socket, ticket: bytes) -> None:
    """Prove to know the ticket, and have the listener prove it. Raises NotCopied."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(ours)
    theirs = _receive(sock, _NONCE_BYTES)
    if not hmac.compare_digest(_receive(sock, _PROOF_BYTES), _proof(ticket, b"listener", ours + theirs)):
        raise NotCopied("whoever listens there does not belong to the run")
    sock.sendall(_proof(ticket, b"caller", ours + theirs))


async def _exactly(stream: trio.SocketStream, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        more = await stream.receive_some(num_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive_into(sock, memoryview(data))
    return bytes(data)


def _receive_into(sock: socket.socket, view: memoryview) -> None:
    """Raises EOFError if less comes."""
    while view:
        if not (count := sock.recv_into(view)):
            raise EOFError("the other side hung up")
        view = view[count:]


def _receive_data(sock: socket.socket, data: memoryview, sums: Iterator[tuple[int]]) -> str:
    """Receive into a slot; return which bytes differ from their checksums, if any do. Raises OSError and EOFError."""
    starts = range(0, len(data), CHUNK_BYTES)
    # A second thread, so that the link does not wait while a chunk is summed.
    with ThreadPoolExecutor(1) as summing:
        summed = []
        for start in starts:
            chunk = data[start : start + CHUNK_BYTES]
            _receive_into(sock, chunk)
            summed.append(summing.submit(zlib.crc32, chunk))
        for start, each, (expected,) in zip(starts, summed, sums, strict=True):
            if each.result() != expected:
                return f"bytes {start} to {min(start + CHUNK_BYTES, len(data))}"
    return ""


def _send_text(sock: socket.socket, text: str) -> None:
    raw = text.encode()[:_MOST_TEXT_BYTES]
    sock.sendall(_TEXT.pack(len(raw)) + raw)


def _receive_text(sock: socket.socket) -> str:
    (size,) = _TEXT.unpack(_receive(sock, _TEXT.size))
    return _receive(sock, size).decode(errors="replace")


def _mark_as_background(sock: socket.socket) -> None:
    is_new = sock.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if is_new else (socket.IPPROTO_IP, socket.IP_TOS)
    with suppress(OSError):  # a container may forbid it
        sock.setsockopt(level, option, _LOWER_EFFORT)
