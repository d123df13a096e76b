"""A mutex of C, taken as torch's bindings take those of NCCL's communicators: with the GIL, or without."""

from __future__ import annotations

import ctypes
import time

__all__ = ["NativeLock"]

_WITHOUT_GIL, _WITH_GIL = ctypes.CDLL(None), ctypes.PyDLL(None)
_MUTEX_BYTES = 64  # at least `pthread_mutex_t` on every platform; zeros are a free one on Linux
_FREEZE_S = 0.5


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class NativeLock:
    """Its calls are those of the C library, so a thread that waits here with the GIL stops all threads of Python."""

    def __init__(self) -> None:
        self._mutex = ctypes.create_string_buffer(_MUTEX_BYTES)

    def take(self) -> None:
        """Take it as a binding with `gil_scoped_release` does."""
        assert _WITHOUT_GIL.pthread_mutex_lock(self._mutex) == 0

    def take_with_gil(self) -> None:
        """Take it as a binding without. Torch would wait for ever; raises AssertionError after half a second."""
        if _WITH_GIL.pthread_mutex_trylock(self._mutex) == 0:
            return
        until_s = time.time() + _FREEZE_S  # by the clock that C's call goes by
        until = _Time(int(until_s), int(until_s % 1 * 1e9))
        if _WITH_GIL.pthread_mutex_timedlock(self._mutex, ctypes.byref(until)) == 0:
            self.release()
        raise AssertionError("a thread waits for a lock with the GIL: no thread of Python runs until it is released")

    def release(self) -> None:
        assert _WITHOUT_GIL.pthread_mutex_unlock(self._mutex) == 0
