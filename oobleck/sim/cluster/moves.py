"""The moves of a virtual training thread: a generator that yields wherever the real one may be preempted or waits."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from .fabric import Wait

Moves = Generator[Wait, None, None]


def pause(what: str) -> Iterator[Wait]:
    """A point where the training thread may be preempted, with nothing to wait for."""
    yield Wait(what, lambda: True)
