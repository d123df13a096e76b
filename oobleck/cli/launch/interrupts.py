"""Ctrl-C, or a notebook's stop button, while somebody waits for a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interrupts:
    """Passes interrupts on to a run as long as the context lasts; afterwards they raise KeyboardInterrupt again.

    While we wait (`is_waiting`), an interrupt raises nothing: the run is to finish its step, which the caller sees to
    the end. In the caller's own code, between two events, it raises KeyboardInterrupt there as well, as it always does.

    Nothing is changed outside the main thread, or where the program has a handler of its own.
    """

    def __init__(self, pass_on: Callable[[], None]) -> None:
        self.is_waiting = True
        self.num = 0
        """How many there were."""
        self._pass_on = pass_on
        self._is_ours = False

    def __enter__(self) -> Interrupts:
        self._is_ours = _is_main() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_ours:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_ours and _is_main() and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def raise_late(self) -> None:
        """Raise the KeyboardInterrupt that was held back, if there was one."""
        if self.num:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.num += 1
        self._pass_on()
        if not self.is_waiting:
            raise KeyboardInterrupt


def _is_main() -> bool:
    """Whether this is the one thread that may set handlers. An abandoned loop may be closed by any."""
    return threading.current_thread() is threading.main_thread()
