"""Runs from Python, `oobleck.launch`: `oobleck up` in a process of its own, and a value that follows and steers it."""

from __future__ import annotations

from .event import Event
from .launching import launch
from .run import Run

__all__ = ["Event", "Run", "launch"]
