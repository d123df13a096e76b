"""Runs from Python (`oobleck.launch`): `oobleck up` in its own process, and a value that follows and steers it."""

from __future__ import annotations

from .launching import launch
from .run import Event, Run

__all__ = ["Event", "Run", "launch"]
