"""What a virtual worker has of the world around it, and how its training thread moves in it."""

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
"""Takes a message to another worker, if it lives and can be reached."""
Moves = Generator[Wait, None, None]
"""The moves of a training thread: it yields wherever the real one may be preempted or waits."""


def pause(what: str) -> Iterator[Wait]:
    """A point where the training thread may be preempted, with nothing to wait for."""
    yield Wait(what, lambda: True)


class Saver(Protocol):
    """What saves a worker's share of the state."""

    def want(self, step: int) -> None:
        """Have the state saved after the first step that is not before this one."""

    def is_wanted(self, step: int) -> bool:
        """Whether this worker wants it saved after `step`."""

    def save(self, effect: Save | SaveEnd) -> None:
        """Save this worker's share, if it has one, and report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPorts:
    """The network, the time, and those who hear of it."""

    fabric: Fabric
    carry: Carry
    tempo: Tempo
    clock: Callable[[], float]
    """Seconds."""
    say: Callable[[WorkerMessage], None]
    """Reports to the agent."""
    announce: Callable[[], None] = lambda: None
    """Called when a message changes what a wait may look for."""
    saver: Saver | None = None
