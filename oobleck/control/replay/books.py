"""All that a master computes from a run's journal, in one pass: what it continues with, shows, counts and sums up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oobleck.control import journal
from oobleck.control.training import Replay, ReplayedRun, ReplayImage

from .finished import FinishedRun, finished_run


@dataclass(frozen=True, slots=True, kw_only=True)
class BooksImage:
    """All that `RunBooks` know of a run that has started."""

    started: journal.JobStarted
    profiles: tuple[journal.ProfileKnown, ...]
    step: int
    furthest_step: int
    gone_nodes: tuple[str, ...]
    saved: journal.CheckpointSaved | None
    end: journal.JobEnded | None
    replay: ReplayImage
    """Without its plans."""
    plans: tuple[journal.PlanAdopted | journal.PlanLine, ...]
    """The plans of `replay`, each as a change of the one before; the last is the newest of all."""
    account: journal.AccountImage
    view: journal.ViewImage
    metrics: journal.MetricsImage


class RunBooks:
    """Follow a journal's entries: O(1) each but for plans, and as much room as the run has nodes and recoveries."""

    def __init__(self) -> None:
        self.account = journal.RunAccount()
        self.view = journal.RunView()
        self.metrics = journal.Metrics()
        self.started: journal.JobStarted | None = None
        self.newest: journal.PlanAdopted | None = None
        """The newest plan."""
        self._profiles: tuple[journal.ProfileKnown, ...] = ()
        self._step = 0
        self.furthest_step = 0
        """The newest step that was ever committed."""
        self.gone_nodes: set[str] = set()
        """Those that were lost or have left, and were not added again."""
        self._saved: journal.CheckpointSaved | None = None
        self._end: journal.JobEnded | None = None
        self._replay: Replay | None = None

    @classmethod
    def of_image(cls, image: BooksImage) -> RunBooks:
        """Continue from what others have come to. Raises PeerError for an image that is none."""
        plans = journal.PlanUnpacker().plans(image.plans)
        books = cls()
        books.started, books.newest = image.started, plans[-1] if plans else None
        books._profiles, books._step, books._saved, books._end = image.profiles, image.step, image.saved, image.end
        books.furthest_step, books.gone_nodes = image.furthest_step, set(image.gone_nodes)
        books._replay = Replay.of_image(replace(image.replay, plans=plans), image.started, image.profiles)
        books.account = journal.RunAccount.of_image(image.account, image.started, books.newest)
        books.view = journal.RunView.of_image(image.view, image.started, books.newest)
        known = (image.started, *image.profiles, books.newest)
        books.metrics = journal.Metrics.of_image(image.metrics, *(entry for entry in known if entry is not None))
        return books

    def image(self) -> BooksImage | None:
        """Return all that they know, for `of_image`; None where nothing has started."""
        if self.started is None or self._replay is None:
            return None
        replay = self._replay.image()
        return BooksImage(
            started=self.started,
            profiles=self._profiles,
            step=self._step,
            furthest_step=self.furthest_step,
            gone_nodes=tuple(sorted(self.gone_nodes)),
            saved=self._saved,
            end=self._end,
            replay=replace(replay, plans=()),
            plans=journal.PlanPacker().plans(replay.plans),
            account=self.account.image(),
            view=self.view.image(),
            metrics=self.metrics.image(),
        )

    def apply(self, entry: journal.JournalEntry) -> None:
        """Take the next entry in."""
        self.account.apply(entry)
        self.view.apply(entry)
        self.metrics.apply(entry)
        match entry:
            case journal.JobStarted():
                self.started, self._replay = entry, Replay(entry)
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
        """The run, where it has ended well, with all of its steps saved."""
        return finished_run(self.started, self._end, self._saved, step=self._step)

    def finish(self) -> ReplayedRun | None:
        """Return the run as its journal has left it; None where it has ended, or never came to train.

        No entry follows.
        """
        return None if self._replay is None or self._end is not None else self._replay.finish()
