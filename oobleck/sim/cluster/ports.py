"""What a virtual worker has of the world around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oobleck.control.protocol import WorkerMessage

from .fabric import Fabric
from .saver import Saver
from .tempo import Tempo

__all__ = ["WorkerPorts"]


def _ignore() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPorts:
    """The network, the time, and those who hear of it."""

    fabric: Fabric
    tempo: Tempo
    clock: Callable[[], float]
    """Seconds."""
    say: Callable[[WorkerMessage], None]
    """Report to the agent."""
    announce: Callable[[], None] = _ignore
    """Called when a message changes what a wait may look for."""
    saver: Saver | None = None
    """What saves its state; None where nothing is saved."""
