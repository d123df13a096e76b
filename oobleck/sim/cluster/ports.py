"""What a virtual worker has of the world around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from oobleck.control.protocol import WorkerMessage
from oobleck.control.steps import Save, SaveEnd

from .agreements import Carry
from .fabric import Fabric
from .tempo import Tempo


def _ignore() -> None:
    pass


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
    """Takes messages to other workers, which `hear` them."""
    tempo: Tempo
    clock: Callable[[], float]
    """Seconds."""
    say: Callable[[WorkerMessage], None]
    """Report to the agent."""
    announce: Callable[[], None] = _ignore
    """Called when a message changes what a wait may look for."""
    saver: Saver | None = None
    """None where nothing is saved."""
