"""Entries about the run as a whole: its start, its end, its masters and its journal."""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.control.protocol import Raised
from oobleck.job import DEFAULT_KIND, JobSpec, NodeSpec
from oobleck.planner import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """The first entry of a run."""

    t_s: float
    version: str
    job: JobSpec
    nodes: tuple[NodeSpec, ...]
    started_at: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterResumed:
    """Another master has taken over a run that went on without one."""

    t_s: float
    away_s: float
    """Since the last entry of the master before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKnown:
    """The model's profile on one kind of node, as the JSON of a profile file: what every plan is computed from."""

    t_s: float
    profile_json: str
    kind: str = DEFAULT_KIND
    num_devices: int = 1
    """Of each node of that kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecided:
    """From here on so many nodes train, and the others rest."""

    t_s: float
    policy: str
    num_nodes: int
    num_available: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalGap:
    """The journal itself could not be written for a while; what it says of that time came late, or is missing.

    There is one when it begins (`until_s` is None), where the disk has room for it, and one when it is over.
    """

    t_s: float
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something for people to read, never to decide by; `level` is info, warning or error."""

    t_s: float
    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """The exception that ended a worker."""

    worker_id: WorkerId
    end: Raised


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """The last entry of a run."""

    t_s: float
    exit_code: int
    reason: str
    """For people."""
    error: WorkerError | None = None
    """The exception that ended the workers, where that is why the run ended."""
