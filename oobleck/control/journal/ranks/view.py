"""The part of a run's view that is about a script's ranks."""

from __future__ import annotations

from oobleck.control.journal.snapshot import RunState

from . import entries


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
        self,
        entry: entries.ScriptStarted
        | entries.GenerationFormed
        | entries.GenerationRuns
        | entries.RankDown
        | entries.RanksHung
        | entries.GenerationEnded,
    ) -> None:
        """Take the next entry."""
        match entry:
            case entries.ScriptStarted(run=run):
                self.tag, self.command, self.state = run.tag, run.kinds, RunState.STARTING
            case entries.GenerationFormed(generation=generation, cause=cause):
                self.num_restarts += cause.is_failure
                self.generation = generation
            case entries.GenerationRuns():
                self.state = RunState.TRAINING
            case entries.GenerationEnded(cause=cause):
                self.state = RunState.RECONFIGURING
                self.is_finished = cause is entries.GenerationCause.FINISHED
            case entries.RankDown() | entries.RanksHung():
                pass
