"""All that a master computes from a run's journal, in one pass: its state, its views, its counts and its summary.

An image stands for all entries up to a place: `RunBooks.of_image(image)` and the entries after that place lead to the
same result as all entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from oobleck.control import journal
from oobleck.control.training import ReplayedRun, ReplayImage
from oobleck.errors import ExitCode, PeerError
from oobleck.job import JobSpec


@dataclass(slots=True, kw_only=True)
class RunBooks:
    """Follow a journal's entries, each in O(1) except plans, in space proportional to the nodes and recoveries.

    A value on the wire, as a part of its image.
    """

    account: journal.RunAccount = field(default_factory=journal.RunAccount)
    view: journal.RunView = field(default_factory=journal.RunView)
    metrics: journal.Metrics = field(default_factory=journal.Metrics)
    started: journal.JobStarted | None = None
    newest: journal.PlanAdopted | None = field(default=None, init=False)
    furthest_step: int = 0
    """The newest step that was ever committed."""
    gone_nodes: set[str] = field(default_factory=set)
    """Nodes that were lost or have left, and were not added again."""
    _profiles: tuple[journal.ProfileKnown, ...] = ()
    _step: int = 0
    _saved: journal.CheckpointSaved | None = None
    _end: journal.JobEnded | None = None
    _replay: ReplayedRun | None = field(default=None, init=False, compare=False)

    @classmethod
    def of_image(cls, image: BooksImage) -> RunBooks:
        """Continue from an image, and use it up. Raises PeerError for an invalid one."""
        books, plans = image.books, journal.PlanUnpacker().plans(image.plans)
        if books.started is None:
            raise PeerError("an image of a run that never started")
        books.newest = plans[-1] if plans else None
        books._replay = ReplayedRun.of_image(replace(image.replay, plans=plans), books.started, books._profiles)
        books.account.started, books.account.newest = books.started, books.newest
        books.view.learn(books.started, books.newest)
        for entry in (books.started, *books._profiles, books.newest):
            if entry is not None:
                books.metrics.learn(entry)
        return books

    def image(self) -> BooksImage | None:
        """Return all that the books know until the next entry, for `of_image`; None if the run has not started."""
        if self._replay is None:
            return None
        replay = self._replay.image()
        plans = journal.PlanPacker().plans(replay.plans)
        return BooksImage(books=self, replay=replace(replay, plans=()), plans=plans)

    def apply(self, entry: journal.JournalEntry) -> None:
        self.account.apply(entry)
        self.view.apply(entry)
        self.metrics.apply(entry)
        match entry:
            case journal.JobStarted():
                self.started, self._replay = entry, ReplayedRun.begun(entry)
                return
            case journal.ProfileKnown():
                self._profiles = (*(each for each in self._profiles if each.kind != entry.kind), entry)
            case journal.PlanAdopted():
                self.newest = entry
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
        if self._replay is not None and self._end is None:
            self._replay.apply(entry)

    @property
    def finished(self) -> FinishedRun | None:
        """The run, if it has ended well with all of its steps saved."""
        end, saved = self._end, self._saved
        if self.started is None or end is None or saved is None or end.exit_code != ExitCode.DONE:
            return None
        job = self.started.job
        is_whole = saved.step >= max(self._step, job.max_steps)
        return FinishedRun(job=job, name=saved.name, step=saved.step) if is_whole else None

    def finish(self) -> ReplayedRun | None:
        """Return the run as its journal has left it; None if it has ended, or never trained.

        No entry follows.
        """
        return None if self._replay is None or self._end is not None else self._replay.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class BooksImage:
    """Books as they are written, with their plans apart."""

    books: RunBooks
    replay: ReplayImage
    """Without its plans."""
    plans: tuple[journal.PlanAdopted | journal.PlanLine, ...]
    """The plans of `replay`, each as a change of the one before; the last is the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run that has ended well, with all of its steps saved."""

    job: JobSpec
    name: str
    step: int

    def is_all_of(self, job: JobSpec) -> bool:
        """Whether it did what `job` asks for: the same model in the same place, trained at least as far."""
        same = (self.job.tag, self.job.model, self.job.script, self.job.checkpoint.directory) == (
            job.tag,
            job.model,
            job.script,
            job.checkpoint.directory,
        )
        return same and job.checkpoint.enabled and self.step >= job.max_steps
