"""Entries about the run as a whole: its start, its end, its masters and its journal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from oobleck.control.protocol import Raised
from oobleck.errors import ExitCode
from oobleck.job import DEFAULT_KIND, JobSpec, NodeSpec
from oobleck.planner import WorkerId

from .entry import Entry, Worded


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted(Entry):
    """The first entry of a run."""

    version: str
    job: JobSpec
    nodes: tuple[NodeSpec, ...]
    started_at: str
    """UTC, ISO 8601."""

    @property
    def sentence(self) -> str:
        return f"job {self.job.tag} starts on {len(self.nodes)} nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterResumed(Entry):
    """Another master has taken over a run that continued without one."""

    level: ClassVar[str] = "warning"
    away_s: float
    """How long ago the previous master made its last entry."""

    @property
    def sentence(self) -> str:
        return f"a new master takes over; the previous one was last active {self.away_s:.1f} s ago"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKnown(Entry):
    """The model's profile on one kind of node, as a profile file's JSON: every plan is computed from it."""

    profile_json: str
    kind: str = DEFAULT_KIND
    num_devices: int = 1

    @property
    def sentence(self) -> str:
        return "the model's profile is known" + (f" on {self.kind}" if self.kind != DEFAULT_KIND else "")


class Measured(Worded):
    """What workers measure before the first plan, in words with the workers or links concerned."""

    LAYERS = "layers", "{} what the model's layers cost"
    LINKS = "links", "timing links: {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementBegun(Entry):
    """No earlier run has left these costs, so workers measure them."""

    what: Measured
    workers: tuple[WorkerId, ...]
    """Those of a machine that measure layers; of links, the first worker of each pair and then its peer."""

    @property
    def sentence(self) -> str:
        if self.what is Measured.LINKS:
            pairs = zip(self.workers[::2], self.workers[1::2], strict=False)
            return self.what.template.format(", ".join(f"{one} and {other}" for one, other in pairs))
        first, *others = self.workers
        also = f" and {len(others)} more of its machine measure" if others else " measures"
        return self.what.template.format(f"{first}{also}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecided(Entry):
    """From here on `num_nodes` nodes train, and the others rest."""

    policy: str
    num_nodes: int
    num_available: int
    reason: str

    @property
    def sentence(self) -> str:
        return f"{self.num_nodes} of {self.num_available} nodes are to train ({self.policy}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalGap(Entry):
    """The journal could not be written for a while; its entries of that time came late, or are missing.

    One entry marks the gap's beginning (`until_s` is None), if the disk has room for it, and one its end.
    """

    level: ClassVar[str] = "error"
    since_s: float
    """The time of the first entry that could not be written."""
    until_s: float | None
    problem: str
    num_late: int = 0
    """Entries that were written once that was possible again."""
    num_lost: int = 0
    """Entries that were never written: there were more than are kept."""

    @property
    def is_open(self) -> bool:
        return self.until_s is None

    @property
    def sentence(self) -> str:
        since = f"the journal could not be written from {self.since_s:.1f} s on: {self.problem}"
        if self.until_s is None:
            return f"{since}; what happened since is not in it yet"
        lost = f"{self.num_lost} entries are missing" if self.num_lost else "nothing is missing"
        return f"{since}; it is written again since {self.until_s:.1f} s: {self.num_late} entries came late, {lost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Entry):
    """A text for people, which decides nothing; `level` is info, warning or error."""

    level: str = field()  # without this, the inherited property would be its default
    text: str

    @property
    def sentence(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    worker_id: WorkerId
    end: Raised

    @property
    def text(self) -> str:
        return f"an error ended the workers; {self.worker_id} reported:\n{self.end.traceback or self.end.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Entry):
    exit_code: int
    reason: str
    error: WorkerError | None = None

    @property
    def level(self) -> str:
        return "info" if self.exit_code == ExitCode.DONE else "error"

    @property
    def sentence(self) -> str:
        return self.reason


RunEntry = (
    JobStarted | MasterResumed | MeasurementBegun | ProfileKnown | ScalingDecided | JournalGap | Notice | JobEnded
)
