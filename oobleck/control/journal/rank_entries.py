"""Entries about a run of a script (`oobleck run`): its start, its generations, and ranks that fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oobleck.control.protocol import ProcessEnd, RankError, end_text
from oobleck.job import NodeSpec
from oobleck.job.ranks import RanksSpec
from oobleck.planner import WorkerId
from oobleck.planner.formatting import counted

from .entry import Entry, Worded


class GenerationCause(Worded):
    """Why a generation ends, and another one begins, in words with the nodes concerned."""

    START = "start", "it begins"
    RANK_FAILED = "rank_failed", "a rank has failed"
    HANG = "hang", "it hangs"
    NODE_LOST = "node_lost", "{} lost"
    NODE_JOINED = "node_joined", "{} joins"
    NODE_DRAINED = "node_drained", "{} leaves"
    STOPPED = "stopped", "a stop was asked for"
    MASTER_LOST = "master_lost", "its master was lost while it started"
    FINISHED = "finished", "all ranks have finished"

    @property
    def is_failure(self) -> bool:
        return self in (GenerationCause.RANK_FAILED, GenerationCause.HANG, GenerationCause.NODE_LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptStarted(Entry):
    """The first entry of a run of a script."""

    version: str
    run: RanksSpec
    nodes: tuple[NodeSpec, ...]
    started_at: str
    """UTC, ISO 8601."""

    @property
    def sentence(self) -> str:
        return f"{self.run.kinds} starts on {counted(len(self.nodes), 'node')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """A node's ranks in a generation: `num_ranks` from `first_rank` on."""

    node: str
    first_rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFormed(Entry):
    """The ranks of a generation are ordered to start."""

    generation: int
    cause: GenerationCause
    nodes: tuple[NodeRanks, ...]
    """In the order of group ranks: the first one has rank 0."""
    num_failures: int
    """How many generations have ended because a rank failed."""

    @property
    def world_size(self) -> int:
        return sum(each.num_ranks for each in self.nodes)

    @property
    def sentence(self) -> str:
        names = ", ".join(each.node for each in self.nodes)
        return f"generation {self.generation}: {counted(self.world_size, 'rank')} on {names}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRuns(Entry):
    """All ranks of a generation exist as processes."""

    generation: int
    away_s: float
    """Seconds since the generation before ended; for the first one, since the run started."""
    is_warm: bool
    """Whether all were forked from processes with the script's imports."""
    num_kept: int = 0
    """How many ranks kept their processes, or were spares."""

    @property
    def sentence(self) -> str:
        how = "warm" if self.is_warm else "cold: nothing was imported ahead"
        kept = f"; {counted(self.num_kept, 'rank')} in processes that were there" if self.num_kept else ""
        return f"generation {self.generation} runs, {self.away_s:.2f} s later ({how}{kept})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDown(Entry):
    level: ClassVar[str] = "warning"
    generation: int
    node: str
    rank: int
    local_rank: int
    pid: int
    end: ProcessEnd
    error: RankError | None
    is_first: bool
    """Whether it is the first of its generation: others may have failed because of it."""

    @property
    def sentence(self) -> str:
        return f"rank {self.rank} on {self.node} failed: {self._end_text}"

    def evidence(self, worker_id: WorkerId | None) -> str:
        return f"rank {self.rank}: {self._end_text}"

    def detail(self, worker_id: WorkerId | None) -> str:
        return "" if self.error is None else self.error.detail

    @property
    def _end_text(self) -> str:
        why = f": {self.error.message}" if self.error is not None and self.error.message else ""
        return f"{end_text(self.end)}{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HungRank:
    """Where a rank was when all ranks hung."""

    node: str
    rank: int
    place: str
    """The line of the script; empty where it is not known."""
    is_waiting: bool
    """Whether it was in a collective, or in a backward pass."""
    stack: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksHung(Entry):
    level: ClassVar[str] = "warning"
    generation: int
    quiet_s: float
    culprits: tuple[HungRank, ...]
    """A few of the ranks that do not wait while others do; empty where none stands out."""
    num_waiting: int
    not_joined: str = ""
    """The collective that these have not joined, by torch's flight recorder; empty where that is not known."""

    @property
    def sentence(self) -> str:
        return f"generation {self.generation} hangs: {self.evidence(None)}"

    def evidence(self, worker_id: WorkerId | None) -> str:
        quiet = f"no rank has printed or saved anything for {self.quiet_s:.0f} s"
        if not self.culprits:
            return f"{quiet}; none stands out"
        first = self.culprits[0]
        others = f" and {len(self.culprits) - 1} more" if len(self.culprits) > 1 else ""
        where = f" at {first.place}" if first.place else ""
        wait = "1 rank waits" if self.num_waiting == 1 else f"{self.num_waiting} ranks wait"
        what = f", not in {self.not_joined}" if self.not_joined else ""
        return f"{quiet}; {wait} for rank {first.rank} on {first.node}{others}{what}{where}"

    def detail(self, worker_id: WorkerId | None) -> str:
        return self.culprits[0].stack if self.culprits else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded(Entry):
    """A generation is over, or its ranks are being ended."""

    generation: int
    cause: GenerationCause
    nodes: tuple[str, ...] = ()
    """The nodes that were lost, have joined, or are to leave."""

    @property
    def level(self) -> str:
        return "warning" if self.cause.is_failure else "info"

    @property
    def sentence(self) -> str:
        return f"generation {self.generation} ends: {self.cause.template.format(', '.join(self.nodes))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesProtected(Entry):
    """How safe the states are that ranks have saved in memory; recorded now and then, and when that changes."""

    newest: int | None
    """The newest step that all ranks have saved."""
    protected: int | None
    """The newest step that survives the loss of a node; None where there is no such state."""
    num_missing: int
    """How many parts of the newest protected state have too few copies by now."""

    @property
    def sentence(self) -> str:
        if self.newest is None:
            return "saved states: none"
        if self.protected is None:
            missing = f": {counted(self.num_missing, 'part')} without a copy" if self.num_missing else ""
            return f"saved states: step {self.newest}; none outlives the loss of a node{missing}"
        if self.protected == self.newest:
            return f"saved states: step {self.newest}, which outlives the loss of a node"
        return f"saved states: step {self.newest}; that of step {self.protected} outlives the loss of a node"

    @property
    def text(self) -> str:
        """The step that outlives the loss of a node, in few words."""
        step = "none" if self.protected is None else f"step {self.protected}"
        return step if self.protected == self.newest else f"{step} (newest step {self.newest})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsSaved(Entry):
    """Steps of a script, up to one whose state all ranks have saved; recorded once a second at most."""

    generation: int
    first_step: int
    step: int
    worked_s: float
    """Seconds that these took rank 0, with what it did between them."""
    loss: float | None
    """That of the last one, as rank 0 named it."""

    @property
    def num_steps(self) -> int:
        return self.step - self.first_step + 1

    @property
    def sentence(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        each = f", {self.worked_s / self.num_steps:.3f} s each" if self.num_steps > 1 else ""
        return f"step {self.step} saved{loss}{each}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUnwritten(Entry):
    """A node could not write a script's saved state to disk; recorded once for each start of ranks."""

    level: ClassVar[str] = "error"
    node: str
    step: int
    rank: int
    reason: str

    @property
    def sentence(self) -> str:
        return f"step {self.step} of rank {self.rank} is in memory alone: {self.node}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecomputed(Entry):
    """A step was computed again, with each rank on another node: what had a bad loss before computed it wrongly."""

    level: ClassVar[str] = "error"
    step: int
    losses: tuple[tuple[str, int, str], ...]
    """(node, rank, loss as text) of what was bad."""
    is_sure: bool
    """Whether other ranks had good losses: a bad one that all have, as after a sum, has no culprit."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node for node, _, _ in self.losses))

    @property
    def sentence(self) -> str:
        first = self.losses[0]
        who = ", ".join(self.nodes) if self.is_sure else "some node"
        return f"step {self.step} had a loss of {first[2]}, and others computed it well: {who} computed it wrongly"


RankEntry = (
    StepRecomputed
    | StateUnwritten
    | ScriptStarted
    | GenerationFormed
    | GenerationRuns
    | RankDown
    | RanksHung
    | StatesProtected
    | StepsSaved
    | GenerationEnded
)
