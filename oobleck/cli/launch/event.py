"""What happens in a run, one thing after the other."""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.control.journal import JournalEntry


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of a run's journal; `str(event)` is the sentence that people read."""

    entry: JournalEntry
    """`StepDone`, `NodeLost`, `RecoveryDone` and so on, from `oobleck.control.journal`."""

    @property
    def kind(self) -> str:
        """The name of the entry's class."""
        return type(self.entry).__name__

    @property
    def t_s(self) -> float:
        """Seconds since the run's start."""
        return self.entry.t_s

    @property
    def level(self) -> str:
        """info, warning or error."""
        return self.entry.level

    def __str__(self) -> str:
        return self.entry.sentence
