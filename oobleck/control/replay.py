"""All that a master computes from a run's journal, in one pass: what it continues with, shows, counts and sums up.

What follows from the entries up to a place is a value that stands for all of them: `RunBooks.of_image(image)` and the
entries after the image's place come to what all entries come to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleck.control import journal
from oobleck.control.scripts import ReplayedRanks
from oobleck.control.training import ReplayedRun
from oobleck.errors import ExitCode, PeerError
from oobleck.job import JobSpec
from oobleck.job.secrets import public_job


@dataclass(slots=True, kw_only=True)
class RunBooks:
    """Follow a journal's entries: O(1) each but for plans, and as much room as the run has nodes and recoveries.

    A value on the wire, as a part of its image.
    """

    account: journal.RunAccount = field(default_factory=journal.RunAccount)
    view: journal.RunView = field(default_factory=journal.RunView)
    metrics: journal.Metrics = field(default_factory=journal.Metrics)
    furthest_step: int = 0
    """The newest step that was ever committed."""
    gone_nodes: set[str] = field(default_factory=set)
    """Nodes that were lost or have left, and were not added again."""
    _step: int = 0
    _saved: journal.CheckpointSaved | None = None
    _end: journal.JobEnded | None = None
    _replay: ReplayedRun | None = None
    """The run until it ends; None where nothing that trains has started."""
    _ranks: ReplayedRanks | None = None
    """The run of a script, likewise."""

    @classmethod
    def of_image(cls, image: BooksImage) -> RunBooks:
        """Continue from an image, which is used up. Raises PeerError for one that is none."""
        books, replay = image.books, image.books._replay
        if replay is None:
            if books._ranks is None:
                raise PeerError("an image of a run that never started")
            return books
        replay.learn(journal.PlanUnpacker().plans(image.plans))
        # These fields repeat other parts of the image, which is why they are not in it.
        books.account.started, books.account.newest = replay.started, books.newest
        books.view.learn(replay.started, books.newest)
        for entry in (replay.started, *replay.profiles.values(), books.newest):
            if entry is not None:
                books.metrics.learn(entry)
        return books

    def image(self) -> BooksImage | None:
        """Return all that they know, for `of_image`, until the next entry; None where nothing has started."""
        if self._replay is None and self._ranks is None:
            return None
        plans = [] if self._replay is None else self._replay.plans
        return BooksImage(books=self, plans=journal.PlanPacker().plans(plans))

    @property
    def started(self) -> journal.JobStarted | None:
        return None if self._replay is None else self._replay.started

    @property
    def newest(self) -> journal.PlanAdopted | None:
        return self._replay.plans[-1] if self._replay is not None and self._replay.plans else None

    def apply(self, entry: journal.JournalEntry) -> None:
        self.account.apply(entry)
        self.view.apply(entry)
        self.metrics.apply(entry)
        match entry:
            case journal.JobStarted():
                self._replay = ReplayedRun.begin(entry)
                return
            case journal.ScriptStarted():
                self._ranks = ReplayedRanks.begin(entry)
                return
            case journal.StepDone(record=record):
                self._step = record.step
                self.furthest_step = max(self.furthest_step, record.step)
            case journal.NodeLost(node=node) | journal.NodeLeft(node=node):
                self.gone_nodes.add(node)
            case journal.NodeAdded(node=spec):
                self.gone_nodes.discard(spec.name)
            case journal.CheckpointSaved():
                self._saved = entry
            case journal.JobEnded():
                self._end = entry
            case _:
                pass
        for replay in (self._replay, self._ranks):
            if replay is not None and self._end is None:
                replay.apply(entry)

    @property
    def finished(self) -> FinishedRun | None:
        """The run, where it has ended well, with all of its steps saved."""
        end, saved = self._end, self._saved
        if self.started is None or end is None or saved is None or end.exit_code != ExitCode.DONE:
            return None
        job = self.started.job
        # A run that was stopped, or whose last step is not saved, has more to do.
        is_whole = saved.step >= max(self._step, job.max_steps)
        return FinishedRun(job=job, name=saved.name, step=saved.step) if is_whole else None

    def finish(self) -> ReplayedRun | None:
        """Return the run as its journal has left it; None where it has ended, or never came to train.

        No entry follows.
        """
        return None if self._replay is None or self._end is not None else self._replay.finish()

    @property
    def ranks(self) -> ReplayedRanks | None:
        """The run of a script as its journal has left it; None where it has ended, or no rank was ever started."""
        is_left = self._ranks is not None and self._ranks.formed is not None and self._end is None
        return self._ranks if is_left else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BooksImage:
    """All that books know, as it is written: plans, many of which may be alike, stand apart."""

    books: RunBooks
    plans: tuple[journal.PlanAdopted | journal.PlanLine, ...]
    """The plans that the books keep, each as a change of the one before; the last is the newest of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run that has ended well, with all of its steps saved."""

    job: JobSpec
    name: str
    """The name of its last checkpoint."""
    step: int

    def is_all_of(self, job: JobSpec) -> bool:
        """Whether it is what `job` asks for: the same model, trained as far at least, in the same place."""
        ours, theirs = (
            (each.tag, each.model, each.script, each.checkpoint.directory) for each in (self.job, public_job(job))
        )
        return ours == theirs and job.checkpoint.enabled and self.step >= job.max_steps
