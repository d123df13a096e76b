"""Entries about the run as a whole: its start, its end, its masters and its journal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from oobleck.control.protocol import Raised
from oobleck.errors import ExitCode
from oobleck.job import DEFAULT_KIND, JobSpec, NodeSpec
from oobleck.planner import WorkerId

from .entry import Entry


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
    """Another master has taken over a run that went on without one."""

    level: ClassVar[str] = "warning"
    away_s: float
    """Since the last entry of the master before."""

    @property
    def sentence(self) -> str:
        return f"a new master takes over; the one before was last heard {self.away_s:.1f} s ago"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKnown(Entry):
    """The model's profile on one kind of node, as the JSON of a profile file: what every plan is computed from."""

    profile_json: str
    kind: str = DEFAULT_KIND
    num_devices: int = 1
    """Of each node of that kind."""

    @property
    def sentence(self) -> str:
        return "the model's profile is known" + (f" on {self.kind}" if self.kind != DEFAULT_KIND else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecided(Entry):
    """From here on so many nodes train, and the others rest."""

    policy: str
    num_nodes: int
    num_available: int
    reason: str

    @property
    def sentence(self) -> str:
        return f"{self.num_nodes} of {self.num_available} nodes are to train ({self.policy}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalGap(Entry):
    """The journal itself could not be written for a while; what it says of that time came late, or is missing.

    There is one when it begins (`until_s` is None), where the disk has room for it, and one when it is over.
    """

    level: ClassVar[str] = "error"
    since_s: float
    """The time of the first entry that could not be written."""
    until_s: float | None
    problem: str
    num_late: int = 0
    """Entries that were written when that was possible again."""
    num_lost: int = 0
    """Entries that were not: there were more than are kept."""

    @property
    def is_open(self) -> bool:
        return self.until_s is None

    @property
    def sentence(self) -> str:
        since = f"the journal could not be written from {self.since_s:.1f} s on: {self.problem}"
        if self.until_s is None:
            return f"{since}; what happened since is not in it yet"
        lost = f"{self.num_lost} entries are missing" if self.num_lost else "nothing is missing"
        return f"{since}; since {self.until_s:.1f} s it is: {self.num_late} entries came late, {lost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Entry):
    """Something for people to read, never to decide by; `level` is info, warning or error."""

    level: str = field()  # without this, the property of that name would be its default
    text: str

    @property
    def sentence(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """The exception that ended a worker."""

    worker_id: WorkerId
    end: Raised

    @property
    def text(self) -> str:
        """All that is known of it."""
        return f"an error ended the workers; {self.worker_id} said:\n{self.end.traceback or self.end.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Entry):
    """The last entry of a run."""

    exit_code: int
    reason: str
    error: WorkerError | None = None
    """The exception that ended the workers, where that is why the run ended."""

    @property
    def level(self) -> str:
        return "info" if self.exit_code == ExitCode.DONE else "error"

    @property
    def sentence(self) -> str:
        return self.reason


RunEntry = JobStarted | MasterResumed | ProfileKnown | ScalingDecided | JournalGap | Notice | JobEnded
