"""A rank's line to its agent: it hears that its attempt is over, and which place it has in the next one."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from oobleck.control.protocol import ATTEMPTS, PAST, WAITS, BecomeRank, InterruptRank
from oobleck.wire import FrameDecoder

from .groups import Groups

Enter = Callable[[BecomeRank, socket.socket], None]
"""Takes a rank's place, and the socket for output that no file takes."""

_MOST_BYTES = 1 << 16
_REST_S = 0.2
_STUCK_S = 2.0
_LOOK_S = 0.02


class Line:
    """Heard in a thread of its own, once `open` was called, which happens once."""

    def __init__(self, sock: socket.socket, enter: Enter, *, is_spare: bool, hears_within_s: float = 10.0) -> None:
        """`enter` makes this process the rank of a place.

        A collective's error may precede the news of a lost rank, which comes over agents and the master, by
        `hears_within_s`.
        """
        self.hears_within_s = hears_within_s
        self.is_spare = is_spare
        self.groups = Groups()
        self.is_opened = False
        """Whether `open` was called, even if `close` was too."""
        self.is_over = False
        """Whether the attempt has ended for all ranks."""
        self.asked_s: float | None = None
        """When it was asked to end after the next save, by the monotonic clock; None if it was not."""
        self._sock = sock
        self._enter = enter
        self._changed = threading.Condition()
        self._has_left = True
        self._place: tuple[BecomeRank, socket.socket] | None = None

    def open(self) -> None:
        """Tell the agent that this process can stay, and hear it from now on."""
        self.is_opened = True
        self._has_left = self.is_spare
        self._main, self._main_ident = threading.get_native_id(), threading.get_ident()
        self._sock.setblocking(True)
        threading.Thread(target=self._hear, name="oobleck-attempts", daemon=True).start()
        self._say(ATTEMPTS)

    def close(self) -> None:
        """Tell the agent that this process runs no attempts any more."""
        with self._changed:
            self._has_left = True
            self._changed.notify_all()
        self._say(PAST)

    def wait_until_over(self, within_s: float) -> bool:
        """Return whether the attempt has ended for all, or does within some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over, within_s)

    def take_place(self) -> None:
        """Wait for the next place, and take it."""
        self._say(WAITS)
        with self._changed:
            self._has_left = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._place is not None)
            assert self._place is not None
            (order, overflow), self._place = self._place, None
            self.is_over = self.is_spare = False
            self.asked_s = None
        self.groups.forget()
        self._enter(order, overflow)
        self._has_left = False

    def _say(self, what: bytes) -> None:
        with suppress(OSError):  # the agent is gone, and this process is about to be killed
            self._sock.sendall(what)

    # --- in a thread of its own --------------------------------------------------------------------------------------

    def _hear(self) -> None:
        decoder = FrameDecoder[BecomeRank | InterruptRank](BecomeRank | InterruptRank)
        descriptors: list[int] = []
        while True:
            try:
                data, found, _, _ = socket.recv_fds(self._sock, _MOST_BYTES, 1)
            except OSError:
                return
            descriptors += found
            if not data:
                return  # the agent is gone, and the kernel ends this process
            for order in decoder.feed(data):
                if isinstance(order, InterruptRank):
                    self._interrupt(after_save=order.after_save)
                else:
                    os.set_inheritable(descriptor := descriptors.pop(0), False)
                    with self._changed:
                        self._place = order, socket.socket(fileno=descriptor)
                        self._changed.notify_all()

    def _interrupt(self, *, after_save: bool) -> None:
        if after_save:
            self.asked_s = time.monotonic()
            return
        with self._changed:
            self.is_over = True
            self._changed.notify_all()
        self.groups.interrupt(within_s=_REST_S)
        if not self._leaves(_STUCK_S):
            # Nothing can end what this process waits for; another takes its place.
            self._say_where()
            os.kill(os.getpid(), signal.SIGKILL)

    def _say_where(self) -> None:
        sys.stderr.write("oobleck: this process is replaced: its attempt is over, and it does not leave\n")
        traceback.print_stack(sys._current_frames()[self._main_ident])
        sys.stderr.flush()

    def _leaves(self, within_s: float) -> bool:
        """Return False once the main thread was idle for so much longer than busy, and has not left the attempt."""
        ticks, looked_s, idle_s = self._ticks(), time.monotonic(), 0.0
        while not self._has_left:
            before, since_s = ticks, looked_s
            ticks, looked_s = self._ticks(), time.monotonic()
            # One that waits for others in a store looks for them a hundred times a second, which is not to compute.
            passed_s = looked_s - since_s
            idle_s = max(0.0, idle_s + (passed_s if ticks == before else -passed_s))
            if idle_s >= within_s:
                return False
            with self._changed:
                self._changed.wait_for(lambda: self._has_left, _LOOK_S)
        return True

    def _ticks(self) -> float:
        """Return the main thread's processor time, in clock ticks; nan while it runs, or waits for a processor."""
        stat = Path(f"/proc/self/task/{self._main}/stat").read_text(encoding="utf-8")
        state, *fields = stat.rpartition(")")[2].split()
        return math.nan if state == "R" else float(fields[10]) + float(fields[11])


_line: Line | None = None


def set_line(line: Line | None) -> None:
    """Give this process, which an agent runs as a rank, its line; None takes it away."""
    global _line
    _line = line


def the_line() -> Line | None:
    """Return this process's line; None if no agent runs it."""
    return _line
