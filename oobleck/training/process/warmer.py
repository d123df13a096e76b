"""Runs a fork server's warm process: when it imports what, and what happens when that goes wrong.

    none ── the log has not grown for a second ──> importing ── READY ──> ready ── the log has grown ──> importing
      ^                                               │                     │
      └──── ended, stuck, refused a package ──────────┴──── ended, stopped ─┘

While the process is not ready, the server itself forks ranks, cold. So whatever a package does on import, and whatever
happens to the warm process, costs later ranks their warmth, and nothing else.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from oobleck.host.process_group import signal_group
from oobleck.training.forking import ForkServer, is_stopped

from .import_log import LogReader
from .warm_process import LEARN, READY, REFUSED, TRYING, be_warm

_IDLE_TICK_S = 0.25
_IMPORT_TICK_S = 0.02
_QUIET_S = 1.0
_LONGEST_S = 15.0
"""After this long, the log is imported although it still grows."""
_IMPORT_S = 60.0
"""Limit of one import; the processors may be busy with the ranks."""
# Each start skips the packages that ended earlier ones; a script with more of them than this has its ranks start cold.
_MOST_STARTS = 4
_MESSAGE_BYTES = 4096


@dataclass(slots=True)
class Warmer:
    log: int
    """The descriptor of the import log."""
    warmth: Path
    """A file that exists while the process is ready."""
    work: Callable[[socket.socket], None]
    server: ForkServer
    """Receives reasons why ranks start cold."""
    _: KW_ONLY
    import_s: float = _IMPORT_S
    quiet_s: float = _QUIET_S
    _refused: set[str] = field(init=False, default_factory=set)
    _sock: socket.socket | None = field(init=False, default=None)
    _pid: int = field(init=False, default=0)
    _trying: str = field(init=False, default="")
    _due_s: float | None = field(init=False, default=None)
    """When the current import must have ended; None while there is none."""
    _learned_bytes: int = field(init=False, default=0)
    """The part of the log that the process was asked to import."""
    _size_bytes: int = field(init=False, default=0)
    _since_s: float = field(init=False, default_factory=time.monotonic)
    _grown_s: float = field(init=False, default_factory=time.monotonic)
    _num_starts: int = field(init=False, default=0)

    def tick(self) -> float:
        """Do what is due; returns the seconds until the next call."""
        if self._sock is not None and self._due_s is not None:
            self._listen(self._sock)
            # What it reports may have ended the import.
            if self._due_s is not None and time.monotonic() > self._due_s:
                self._refused.add(self._trying)
                self._lose(f"importing {self._trying} has not ended within {self.import_s:g} s")
            return _IMPORT_TICK_S
        # The last process still learns; only another one would not be started.
        if self._num_starts < _MOST_STARTS or self._sock is not None:
            self._check_log()
        return _IDLE_TICK_S

    def fork(self, descriptors: list[int]) -> bool:
        """Have the process fork, and close the descriptors; returns False where it is not ready."""
        if self._sock is None or self._due_s is not None:
            return False
        # A stopped process would keep the request, and the rank, until it continues.
        if is_stopped(self._pid):
            self._lose("it was stopped")
            return False
        try:
            socket.send_fds(self._sock, [b"f"], descriptors)
        except OSError:  # it has just ended, or its socket is full
            return False
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def spurn(self) -> None:
        """End the process, because it has not answered."""
        if self._sock is not None and self._due_s is None:
            self._lose("it does not answer")

    def note_end(self, pid: int, status: int) -> None:
        """Note the end of a child of the server, which may be the process."""
        if self._sock is None or pid != self._pid:
            return
        # The socket may still hold which module it tried last, or the reason why it ended.
        if not self._listen(self._sock):
            return  # it had reported the reason
        code = os.waitstatus_to_exitcode(status)
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        if self._due_s is None:
            self._lose(how)
        else:
            self._refused.add(self._trying)
            self._lose(f"importing {self._trying} ended it: {how}")

    def leave(self) -> None:
        # A rank that held this socket would keep the process from seeing its end.
        if self._sock is not None:
            self._sock.close()

    def _check_log(self) -> None:
        # A pause in the log shows that the script has made the imports of its start.
        now_s = time.monotonic()
        size_bytes = LogReader(self.log).size_bytes
        if size_bytes == self._learned_bytes:
            self._since_s = self._grown_s = now_s
        elif size_bytes != self._size_bytes:
            self._grown_s = now_s
        elif now_s - self._grown_s >= self.quiet_s or now_s - self._since_s >= _LONGEST_S:
            self._learn(size_bytes)
        self._size_bytes = size_bytes

    def _learn(self, size_bytes: int) -> None:
        # First: nothing that sees the file may count on the process while it imports.
        self.warmth.unlink(missing_ok=True)
        if self._sock is None:
            self._start()
        if self._sock is not None:
            self._trying, self._due_s = "", time.monotonic() + self.import_s
            self._learned_bytes = size_bytes
            with suppress(OSError):  # it has ended: `note_end` follows
                self._sock.send(LEARN + str(size_bytes).encode())

    def _start(self) -> None:
        self._num_starts += 1
        # Packets keep their boundaries, and tell the end of the other side, as streams do.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = LogReader(self.log)
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            ours.close()
            self.server.leave()
            try:
                be_warm(theirs, log, frozenset(self._refused), self.work)
            except BaseException:  # noqa: BLE001  the server notices the end
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        if pid < 0:  # the next tick starts another one
            ours.close()
            return
        # The server also forks cold ranks, so it never waits for the process.
        ours.setblocking(False)
        self._sock, self._pid = ours, pid

    def _listen(self, sock: socket.socket) -> bool:
        """Read the process's progress; returns False where it refused a package, which ends it."""
        while True:
            try:
                message = sock.recv(_MESSAGE_BYTES)
            except OSError:
                return True
            kind, text = message[:1], message[1:].decode(errors="replace")
            if kind == TRYING:
                self._trying, self._due_s = text, time.monotonic() + self.import_s
            elif kind == REFUSED:
                name, _, why = text.partition(" ")
                self._refused.add(name)
                self._lose(f"{name} {why} when it is imported, which no fork takes along")
                return False
            elif kind == READY:
                self._due_s = None
                self.warmth.touch()
            else:
                return True  # an empty message: it has ended, and `note_end` follows

    def _lose(self, problem: str) -> None:
        self.close()
        self._learned_bytes = self._size_bytes = 0  # the next process begins with all of the log
        again = "another one skips that" if self._num_starts < _MOST_STARTS else "there is no other one"
        self.server.tell(f"{problem}; {again}")

    def close(self) -> None:
        """End the process, and all processes that packages have started in it."""
        self.warmth.unlink(missing_ok=True)
        sock, self._sock = self._sock, None
        if sock is None:
            return
        sock.close()
        # The group ends with what packages started; supervisors of ranks have groups of their own and live on.
        signal_group(self._pid)
        self._due_s = None
