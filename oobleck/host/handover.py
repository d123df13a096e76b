"""The point where a script's `train()` hands its trainer over to the run that has started the script, if one has.

    oobleck up      the script's process waits there until the run has ended, and continues
    a worker        the script has done its part: `TrainReached`, which carries the trainer, ends it
    plain python    there is no receiver, and the trainer starts a run itself

The trainer's class and the code that starts scripts know each other only through this module. It imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Receiver = Callable[[Any], Any]
"""Takes the trainer, and returns the result of its `train()`."""


class TrainReached(BaseException):
    """Ends a script at its `train()`."""

    # It is no `Exception`, so that the script's own handlers let it pass.
    def __init__(self, trainer: Any) -> None:
        super().__init__("train() was reached")
        self.trainer = trainer


_receivers: list[Receiver] = []
_of_workers: list[Receiver] = []


@contextmanager
def receiving(receiver: Receiver, *, in_worker: bool = False) -> Iterator[None]:
    """Hand trainers over to `receiver` within the block; `in_worker` if the script ends at its `train()`."""
    _receivers.append(receiver)
    if in_worker:
        _of_workers.append(receiver)
    try:
        yield
    finally:
        _receivers.remove(receiver)
        if in_worker:
            _of_workers.remove(receiver)


def is_in_worker() -> bool:
    """Return whether this script only runs for its parts."""
    return bool(_of_workers)


def is_received() -> bool:
    """Return whether a run has started this script."""
    return bool(_receivers)


def take_over(trainer: Any) -> Any:
    """Hand a trainer over; return the result of its `train()`."""
    return _receivers[-1](trainer)
