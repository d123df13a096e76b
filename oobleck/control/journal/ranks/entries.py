"""Entries about a run of a script (`oobleck run`): its start, its generations, and ranks that fail."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from oobleck.control.protocol import ProcessEnd, RankError
from oobleck.job import NodeSpec
from oobleck.job.ranks import RanksSpec


class GenerationCause(StrEnum):
    """Why a generation ends, and another one begins."""

    START = "start"
    RANK_FAILED = "rank_failed"
    HANG = "hang"
    NODE_LOST = "node_lost"
    NODE_JOINED = "node_joined"
    NODE_DRAINED = "node_drained"
    STOPPED = "stopped"
    FINISHED = "finished"

    @property
    def is_failure(self) -> bool:
        return self in (GenerationCause.RANK_FAILED, GenerationCause.HANG, GenerationCause.NODE_LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptStarted:
    """The first entry of a run of a script."""

    t_s: float
    version: str
    run: RanksSpec
    nodes: tuple[NodeSpec, ...]
    started_at: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """A node's ranks in a generation: `num_ranks` from `first_rank` on."""

    node: str
    first_rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFormed:
    """The ranks of a generation are ordered to start."""

    t_s: float
    generation: int
    cause: GenerationCause
    nodes: tuple[NodeRanks, ...]
    """By group rank: the first one has rank 0."""
    num_failures: int
    """How many generations have ended so far because a rank failed."""

    @property
    def world_size(self) -> int:
        return sum(each.num_ranks for each in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRuns:
    """All ranks of a generation exist as processes."""

    t_s: float
    generation: int
    away_s: float
    """Since the generation before ended; of the first one, since the run started."""
    is_warm: bool
    """Whether all were forked from processes that had imported what the script imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDown:
    """A rank has failed."""

    t_s: float
    generation: int
    node: str
    rank: int
    local_rank: int
    pid: int
    end: ProcessEnd
    error: RankError | None
    is_first: bool
    """Of its generation: the others may have failed because of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HungRank:
    """Where a rank was when all hung."""

    node: str
    rank: int
    place: str
    """In the script; empty where it did not say."""
    is_waiting: bool
    """In a collective, or in a backward pass."""
    stack: str
    """Of all its threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksHung:
    """The ranks of a generation hang."""

    t_s: float
    generation: int
    quiet_s: float
    """For how long none has printed or saved anything."""
    culprits: tuple[HungRank, ...]
    """Those that do not wait while others do, a few of them; empty where none stands out."""
    num_waiting: int
    """How many wait in a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded:
    """A generation is over, or its ranks are being ended."""

    t_s: float
    generation: int
    cause: GenerationCause
    nodes: tuple[str, ...] = ()
    """That were lost, have come, or are to leave."""
