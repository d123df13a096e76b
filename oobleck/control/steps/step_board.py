"""Which steps a worker may begin, where that does not follow from their number. The control thread fills the boards.

Data in shards has a board of its own (`training/data/records.py`): a step may begin once its records are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from oobleck.control import protocol


class StepBoard(Protocol):
    def is_told(self, step: int) -> bool:
        """Whether a step may begin."""

    def over_after(self, step: int) -> protocol.StepsOver | None:
        """Return the message that no step follows this one, if it has arrived."""

    def is_last(self, step: int) -> bool:
        """Whether no step follows this one, as far as that is known before it is committed."""


class ConsentBoard:
    """Steps begin with the consent of the job's script, which hears of each step before the next one begins."""

    def __init__(self, generation_of: Callable[[], int]) -> None:
        """`generation_of` returns the generation of the plan that the worker follows."""
        self._generation_of = generation_of
        self._allowed = (0, 0)
        """(generation, the last step that may begin under its plan)"""
        self._over: protocol.StepsOver | None = None

    # --- control thread ------------------------------------------------------------------------------------

    def allow(self, message: protocol.StepsAllowed) -> None:
        # A plan may go back, so its steps are not those that the plan before it was allowed.
        self._allowed = max(self._allowed, (message.generation, message.through))

    def end(self, over: protocol.StepsOver) -> None:
        self._over = over

    # --- training thread -----------------------------------------------------------------------------------

    def is_told(self, step: int) -> bool:
        generation, through = self._allowed
        return generation == self._generation_of() and step <= through

    def over_after(self, step: int) -> protocol.StepsOver | None:
        over = self._over
        is_now = over is not None and (over.generation, over.step) == (self._generation_of(), step)
        return over if is_now else None

    def is_last(self, step: int) -> bool:
        return False
