"""The part of a run's view that is about a script's ranks."""

from __future__ import annotations

from oobleck.control.journal.snapshot import RunState

from .entries import (
    GenerationCause,
    GenerationEnded,
    GenerationFormed,
    GenerationRuns,
    RankDown,
    RanksHung,
    ScriptStarted,
)


class RanksView:
    """Follows a script's generations. O(1) an entry."""

    def __init__(self) -> None:
        self.tag = ""
        self.command = ""
        self.state: RunState | None = None
        """None for a run that is of no script."""
        self.generation = 0
        self.num_restarts = 0
        self.is_finished = False
        """All ranks have ended well."""

    def apply(
        self, entry: ScriptStarted | GenerationFormed | GenerationRuns | RankDown | RanksHung | GenerationEnded
    ) -> None:
        """Take the next entry."""
        match entry:
            case ScriptStarted(run=run):
                self.tag, self.command, self.state = run.tag, run.kinds, RunState.STARTING
            case GenerationFormed(generation=generation, cause=cause):
                self.num_restarts += cause.is_failure
                self.generation = generation
            case GenerationRuns():
                self.state = RunState.TRAINING
            case GenerationEnded(cause=cause):
                self.state = RunState.RECONFIGURING
                self.is_finished = cause is GenerationCause.FINISHED
            case RankDown() | RanksHung():
                pass
