"""The ports of a virtual worker to the world, and the moves of its training thread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

from oobleck.control.protocol import CommitMessage, WorkerMessage
from oobleck.control.steps import Save, SaveEnd
from oobleck.planner import WorkerId

from .fabric import Fabric, Wait
from .tempo import Tempo

Carry = Callable[[WorkerId, CommitMessage], None]
"""Delivers a message to another worker that lives and is reachable."""
Moves = Generator[Wait, None, None]
"""The moves of a training thread, which yields wherever the real one may be preempted or waits."""


def pause(what: str) -> Iterator[Wait]:
    """Yield a preemption point of the training thread."""
    yield Wait(what, lambda: True)


class Saver(Protocol):
    def want(self, step: int) -> None:
        """Request a save after this step, or the first one later."""

    def go_back(self) -> None:
        """Note that steps are run again, and saved again."""

    def is_wanted(self, step: int) -> bool:
        """Return whether this worker wants a save after `step`."""

    def save(self, effect: Save | SaveEnd) -> None:
        """Save this worker's share, if it has one, and report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPorts:
    fabric: Fabric
    carry: Carry
    tempo: Tempo
    clock: Callable[[], float]
    say: Callable[[WorkerMessage], None]
    """Sends a message to the agent."""
    announce: Callable[[], None] = lambda: None
    """Tells that a message may have changed the state of a wait."""
    saver: Saver | None = None
