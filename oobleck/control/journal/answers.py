"""What a script that follows the journal answers: of which step its callbacks have heard, and which may begin.

A job with `control.waits_for_script` has workers wait for it (`control/training/consent.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from .entries import JournalEntry
from .plan_entries import PlanAdopted
from .step_entries import Evaluated, StepDone

_MOST_STEPS = 1000
"""A script answers at least once in this many steps, so that the search for the next one is short."""


class Answers:
    """Knows the steps at which a script is asked, which are a function of their numbers."""

    def __init__(self, *, is_asked: Callable[[int], bool], is_evaluated: Callable[[int], bool]) -> None:
        """`is_evaluated` says whether an evaluation follows a step; the script hears of it before it answers."""
        self._is_asked = is_asked
        self._is_evaluated = is_evaluated
        self._has_begun = False
        self._heard: int | None = None
        """The newest step of which the script has heard all, until it has answered."""
        self._allowed = 0
        """The last step that may begin by its newest answer."""
        self._evaluated_step = 0

    def note(self, entry: JournalEntry) -> None:
        """Note that the script has heard of an entry."""
        match entry:
            case PlanAdopted(boundary=boundary, restored_step=restored, finish=finish):
                if restored is not None:  # the run goes back, and asks at the first step that it runs again
                    self._heard, self._allowed = None, min(self._allowed, restored + 1)
                    self._evaluated_step = min(self._evaluated_step, restored)
                if not self._has_begun:  # a plan may be the first that it hears of, and finish a step before
                    self._has_begun, self._heard = True, boundary if finish is None else None
            case StepDone(record=record):
                # Before its first plan, it follows a master that has taken over, and that may have heard of this one.
                is_due = self._has_begun and self._is_evaluated(record.step)
                self._heard = None if is_due and self._evaluated_step < record.step else record.step
            case Evaluated(step=step):
                self._heard, self._evaluated_step = step, step

    def take(self) -> tuple[int, int] | None:
        """Return the newest step that was heard of, and the last one that may begin; None where no worker waits."""
        step, self._heard = self._heard, None
        if step is None or step < self._allowed:
            return None
        following = range(step + 1, step + _MOST_STEPS + 1)
        self._allowed = next(each for each in following if each % _MOST_STEPS == 0 or self._is_asked(each))
        return step, self._allowed
