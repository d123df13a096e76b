"""The part of the protocol that is about ranks: the processes of a script that `oobleck run` starts.

master ── ConfigureRanks ──> agent      once, when the node is taken in
agent  ── RanksReady ──> master         nothing runs there, and a generation can begin
master ── StartRanks ──> agent ── RanksStarted ──> master
agent  ── RankFailed ──> master         a rank has failed; the agent has killed the node's others already
master ── EndRanks ──> agents ── RanksReady ──> master
agent  ── RanksFinished ──> master      all ranks of the node have ended well
agent  ── RanksUnwritten ──> master     why what its ranks write is not in their files
agent  ── RanksCold ──> master          why later ranks of the node do not start warm
agent  ── RanksQuiet ──> master         whether they have shown no sign of life for long
master ── TraceRanks ──> agent ── RankStacks ──> master
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oobleck.job.ranks import RanksSpec

from .ends import ProcessEnd

TRACE_SIGNAL = 59
"""A signal of real time that nobody uses: a rank writes down where its threads are."""

OVERFLOW_HEAD = struct.Struct(">BIQ")
"""Before what a rank could not write: its descriptor, the error's number, and how many bytes the file had by then."""


class ForRanks:
    """Said to the part of an agent that runs ranks."""

    __slots__ = ()


class FromRanks:
    """Said by the part of an agent that runs ranks."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigureRanks(ForRanks):
    """The master's answer to the hello: what the node is to run. It is said again where it may have been lost."""

    run: RanksSpec
    devices: tuple[int, ...]
    """The node's, as its line of the hostfile has them."""
    generation: int
    """Up to this one, the node has no part in any that it does not know of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRanks(ForRanks):
    """Start the node's ranks of a generation, unless they run already."""

    generation: int
    group_rank: int
    """The node's number in the generation."""
    num_groups: int
    first_rank: int
    num_ranks: int
    world_size: int
    master_address: str
    """Where rank 0 listens, whose node is number 0."""
    master_port: int
    start: str
    """Unlike that of any other generation, of any run: what ranks save belongs to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRanks(ForRanks):
    """End all ranks of generations up to this one, and say `RanksReady` once they are gone."""

    generation: int
    grace_s: float
    """How long they may take once they are asked (SIGTERM); 0 kills them at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReady(FromRanks):
    """No rank of a generation up to this one runs on the node, or will: the next one can begin."""

    generation: int
    num_ranks: int
    """How many the node would have."""
    port: int
    """Free there, and kept for rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStarted(FromRanks):
    """The processes of the node's ranks exist."""

    generation: int
    pids: tuple[int, ...]
    """By local rank."""
    is_warm: bool
    """Whether what they are forked from had imported what earlier ones import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """What is known of why a rank failed."""

    message: str
    """The last line of its traceback, or what its error file says."""
    detail: str = ""
    """Its traceback, or else the end of its standard error."""
    is_exception: bool = False
    """Whether a Python exception ended it; else `message` is only what it wrote last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed(FromRanks):
    """A rank has failed: it was killed, or ended with another status than 0."""

    generation: int
    rank: int
    local_rank: int
    pid: int
    end: ProcessEnd
    error: RankError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFinished(FromRanks):
    """All ranks of the node have ended with status 0."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksCold(FromRanks):
    """The process that had imported ahead what ranks import is lost: until there is another, they start cold."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksUnwritten(FromRanks):
    """A rank could not write to one of its files; what ranks print is shown all the same."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksQuiet(FromRanks):
    """Whether the node's ranks have shown no sign of life for as long as is allowed; said when it changes."""

    generation: int
    is_quiet: bool
    has_shown: bool
    """Whether there ever was a sign in this generation: something printed, or saved."""
    idle: tuple[int, ...]
    """Ranks that have used next to no processor since the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRanks(ForRanks):
    """Say where the ranks of a generation are."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacks(FromRanks):
    """Where the node's ranks are: the threads of each, by rank; empty where it does not say."""

    generation: int
    stacks: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput(FromRanks):
    """What a rank has written, to be shown where the run was started."""

    rank: int
    is_error: bool
    """To standard error."""
    text: str
    """Whole lines, but for the last one that a rank has written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BecomeRank:
    """What an agent says to a process that was forked to be a rank."""

    entry: Literal["script", "module", "program"]
    command: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    stdout: str
    stderr: str
    """Files."""
    logs_imports: bool
    """Whether it notes what it imports, for the process that forks later ones."""


RanksOrder = ConfigureRanks | StartRanks | EndRanks | TraceRanks
RanksReport = (
    RanksReady
    | RanksStarted
    | RankFailed
    | RanksFinished
    | RanksUnwritten
    | RanksCold
    | RanksQuiet
    | RankStacks
    | RankOutput
)
