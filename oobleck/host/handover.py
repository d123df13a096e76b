"""Where a script's `train()` hands its trainer over: to the run that the script was started for, if there is one.

    oobleck up      the process that the script runs in waits there until the run has ended, and continues
    a worker        the script has done its part: it is ended by `TrainReached`, which carries the trainer
    plain python    nobody receives it, and the trainer starts a run itself

The trainer's class and those who start scripts know each other through this module alone. Loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Receiver = Callable[[Any], Any]
"""From the trainer to what its `train()` returns."""


class TrainReached(BaseException):
    """Ends a script at its `train()`. No `Exception`, so that a script's own handlers let it pass."""

    def __init__(self, trainer: Any) -> None:
        super().__init__("train() was reached")
        self.trainer = trainer


_receivers: list[Receiver] = []


@contextmanager
def receiving(receiver: Receiver) -> Iterator[None]:
    """Within the block, trainers are handed over to `receiver`."""
    _receivers.append(receiver)
    try:
        yield
    finally:
        _receivers.remove(receiver)


def is_received() -> bool:
    """Return whether a run has started this script."""
    return bool(_receivers)


def take_over(trainer: Any) -> Any:
    """Hand a trainer over; returns what its `train()` is to return, if it returns."""
    return _receivers[-1](trainer)
