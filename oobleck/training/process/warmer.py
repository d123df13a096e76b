"""A fork server's care for its warm process: when it imports what, and what becomes of it when that goes wrong.

    none ── the log has not grown for a second ──> importing ── READY ──> ready ── the log has grown ──> importing
      ^                                               │                     │
      └──── ended, stuck, refused a package ──────────┴──── ended, stopped ─┘

While it is not ready, ranks are forked from the server itself, cold. So whatever a package does when it is imported, or
is done to the warm process, costs later ranks their warmth, and nothing else.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from oobleck.training.forking import ForkServer

from .import_log import LogReader
from .warm_process import LEARN, READY, REFUSED, TRYING, be_warm

_LOOK_S = 0.25
_LISTEN_S = 0.02
"""How often to look while it imports."""
_QUIET_S = 1.0
"""The log has not grown for so long: the script has imported what it imports when it begins."""
_LONGEST_S = 15.0
"""After so long, what is there is imported, though it may still grow."""
_IMPORT_S = 60.0
"""How long one import may take; the processors may be busy with the ranks."""
_MOST_STARTS = 4
"""A process that ends again after so many starts is not started again: ranks start cold from then on."""
_MESSAGE_BYTES = 4096


class Warmer:
    """The warm process of a fork server."""

    def __init__(
        self,
        log: int,
        warmth: Path,
        work: Callable[[socket.socket], None],
        server: ForkServer,
        *,
        import_s: float = _IMPORT_S,
        quiet_s: float = _QUIET_S,
    ) -> None:
        """`log` is the descriptor of what ranks import, `warmth` a file that is there while the process is ready.

        `server` receives what made ranks start cold.
        """
        self._log = LogReader(log)
        self._file = log
        self._warmth = warmth
        self._work = work
        self._server = server
        self._import_s = import_s
        self._quiet_s = quiet_s
        self._refused: set[str] = set()
        self._sock: socket.socket | None = None
        self._pid = 0
        self._trying = ""
        self._due_s: float | None = None
        """When the import that it is at must have ended; None where it imports nothing."""
        self._learned_bytes = 0
        """Of the log: what it was told to import."""
        self._size_bytes = 0
        self._since_s = self._grown_s = time.monotonic()
        self._num_starts = 0

    @property
    def _is_ready(self) -> bool:
        return self._sock is not None and self._due_s is None

    def tick(self) -> float:
        """Do what is due; returns after how many seconds to be called again."""
        if self._sock is not None and self._due_s is not None:
            self._listen(self._sock)
            if self._due_s is not None and time.monotonic() > self._due_s:
                self._refused.add(self._trying)
                self._lose(f"importing {self._trying} has not ended within {self._import_s:g} s")
            return _LISTEN_S
        if self._num_starts < _MOST_STARTS or self._sock is not None:
            self._look()
        return _LOOK_S

    def fork(self, descriptors: list[int]) -> bool:
        """Have it fork, and close the descriptors; returns False where it is not ready."""
        if self._sock is None or not self._is_ready:
            return False
        if _is_stopped(self._pid):
            self._lose("it was stopped")
            return False
        try:
            socket.send_fds(self._sock, [b"f"], descriptors)
        except OSError:  # it has just ended, or does not listen
            return False
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def spurn(self) -> None:
        """End it: it has not answered."""
        if self._is_ready:
            self._lose("it does not answer")

    def note_end(self, pid: int, status: int) -> None:
        """Note the end of a child of the server, which may be it."""
        if self._sock is None or pid != self._pid:
            return
        if not self._listen(self._sock):
            return  # it has said why itself
        code = os.waitstatus_to_exitcode(status)
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        if self._due_s is None:
            self._lose(how)
        else:
            self._refused.add(self._trying)
            self._lose(f"importing {self._trying} ended it: {how}")

    def leave(self) -> None:
        """Close what a forked process must not hold."""
        if self._sock is not None:
            self._sock.close()

    def close(self) -> None:
        """End it: the server ends."""
        self._end()

    def _look(self) -> None:
        """Have what the log has imported once it has not grown for a while."""
        now_s = time.monotonic()
        size_bytes = self._log.size_bytes
        if size_bytes == self._learned_bytes:
            self._since_s = self._grown_s = now_s
        elif size_bytes != self._size_bytes:
            self._grown_s = now_s
        elif now_s - self._grown_s >= self._quiet_s or now_s - self._since_s >= _LONGEST_S:
            self._learn(size_bytes)
        self._size_bytes = size_bytes

    def _learn(self, size_bytes: int) -> None:
        self._warmth.unlink(missing_ok=True)
        if self._sock is None:
            self._start()
        if self._sock is not None:
            self._trying, self._due_s = "", time.monotonic() + self._import_s
            self._learned_bytes = size_bytes
            with suppress(OSError):  # it has ended, as its end tells
                self._sock.send(LEARN + str(size_bytes).encode())

    def _start(self) -> None:
        self._num_starts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = LogReader(self._file)
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            ours.close()
            self._server.leave()
            try:
                be_warm(theirs, log, frozenset(self._refused), self._work)
            except BaseException:  # noqa: BLE001  the server sees that it has ended
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        if pid < 0:
            ours.close()
            return
        ours.setblocking(False)
        self._sock, self._pid = ours, pid

    def _listen(self, sock: socket.socket) -> bool:
        """Take in how far it is; returns False where it has given itself up."""
        while True:
            try:
                message = sock.recv(_MESSAGE_BYTES)
            except OSError:
                return True
            kind, text = message[:1], message[1:].decode(errors="replace")
            if kind == TRYING:
                self._trying, self._due_s = text, time.monotonic() + self._import_s
            elif kind == REFUSED:
                name, _, why = text.partition(" ")
                self._refused.add(name)
                self._lose(f"{name} {why} when it is imported, which no fork takes along")
                return False
            elif kind == READY:
                self._due_s = None
                self._warmth.touch()
            else:
                return True  # it has ended, as its end tells

    def _lose(self, problem: str) -> None:
        self._end()
        self._learned_bytes = self._size_bytes = 0  # the next one begins with all of the log
        again = "another one skips that" if self._num_starts < _MOST_STARTS else "there is no other one"
        self._server.tell(f"{problem}; {again}")

    def _end(self) -> None:
        """End the process, with what packages have started that it was to import."""
        self._warmth.unlink(missing_ok=True)
        sock, self._sock = self._sock, None
        if sock is None:
            return
        sock.close()
        with suppress(ProcessLookupError):  # its group is its own: supervisors that it has forked have others
            os.killpg(self._pid, signal.SIGKILL)
        self._due_s = None


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    return False
