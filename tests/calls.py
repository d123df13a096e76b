"""Counts calls, where times would vary."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["calls_of"]


def calls_of(act: Callable[[], object]) -> int:
    """How often Python functions and generators are entered while something is done."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    gc.disable()  # a collection would call finalizers of earlier tests
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls
