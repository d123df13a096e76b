"""Messages about ranks: the processes of a script that `oobleck run` starts.

master ── ConfigureRanks ──> agent      once, when the node is taken in
agent  ── RanksReady ──> master         nothing runs there, and a generation can begin
master ── StartRanks ──> agent ── RanksStarted ──> master
agent  ── RankFailed ──> master         a rank has failed; the agent has killed the node's others already
master ── EndRanks ──> agents ── RanksReady ──> master
                                        ranks that run attempts (`oobleck.attempts`) stay, and wait for the next
agent  ── RanksFinished ──> master      all ranks of the node have ended well
agent  ── RanksUnwritten ──> master     why its ranks' output is not in their files
agent  ── RanksCold ──> master          why later ranks of the node do not start warm
agent  ── RanksQuiet ──> master         whether they have shown no sign of life for long
master ── TraceRanks ──> agent ── RankStacks ──> master
agent  ── StatesHeld ──> master         which saved states the node holds
agent  ── StatesKept ──> master         which it keeps by order, for a master that comes later
master ── KeepStates ──> agent          which of them to keep
master ── CopyParts ──> agent ── PartNotCopied ──> master
agent  ── PartNotWritten ──> master     why a saved state is not on its disk
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oobleck.job.ranks import RanksSpec

from .ends import ProcessEnd

# A real-time signal, because scripts and libraries have handlers of their own for the common ones.
TRACE_SIGNAL = 59
"""At this signal a rank writes its threads' stacks."""

FLIGHT_SIGNAL = 60
"""At this signal a rank writes which collectives it has joined, where torch's flight recorder is on."""

OVERFLOW_HEAD = struct.Struct(">BIQ")
"""The head of what a rank could not write: the descriptor, the error number, and the file's size by then."""


ATTEMPTS, WAITS, PAST = b"a", b"w", b"p"
"""What a rank says to its agent: it runs attempts (`oobleck.attempts`); it has left one, or come to the first as a
spare, and waits for its place; it runs none any more."""


class ForRanks:
    """To the part of an agent that runs ranks."""

    __slots__ = ()


class FromRanks:
    """From the part of an agent that runs ranks."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ScriptState:
    """A state that ranks have saved; newer ones are greater."""

    number: int
    """The number of its start: starts that continue from others have greater ones."""
    step: int
    start: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptProgress:
    """How a rank came to a state that it has saved."""

    from_step: int
    """The step that it continued from at its start."""
    worked_s: float
    """Seconds from there to this state."""
    loss: str
    """As text, because not-a-number equals nothing; empty if the script named none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """A part of a state in a node's memory: its own rank's, or a copy of another's."""

    state: ScriptState
    rank: int
    """The rank that saved it."""
    world_size: int
    is_sharded: bool
    can_stay: bool = True
    """Whether its node can keep it while later states are saved: not where memory is too short for that."""
    progress: ScriptProgress | None = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParity:
    """The parity of some ranks' parts of a state, of which any one follows from it and from the others."""

    state: ScriptState
    ranks: tuple[int, ...]
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDoor:
    """Where a node takes in copies, and what proves that a caller belongs to the run."""

    node: str
    host: str
    port: int
    ticket: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What parts are mixed to: the parity of these ranks' parts, or from it and the others the part that is missing."""

    ranks: tuple[int, ...]
    num_bytes: int
    """The bytes of the largest part that is sent."""
    missing: int | None = None

    @property
    def senders(self) -> frozenset[int]:
        return frozenset(self.ranks) - {self.missing}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCopies:
    rank: int
    doors: tuple[CopyDoor, ...]
    """One for each copy."""
    mix: Mix | None = None
    """Where the part is mixed with others, at the only door."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigureRanks(ForRanks):
    """The master's answer to the hello: what the node is to run. Sent again where it may have been lost."""

    run: RanksSpec
    devices: tuple[int, ...]
    """The devices in the node's line of the hostfile."""
    generation: int
    """The node has no part in generations up to this one that it does not know."""
    address: str = ""
    """Where other nodes reach this one."""
    reports_use: bool = False
    """As in `Configure`."""


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
    """Where rank 0 listens, whose node has number 0."""
    master_port: int
    start: str
    """Identifies the generation among those of all runs: the states that its ranks save belong to it."""
    saved_step: int | None = None
    """The newest step that all ranks of an earlier generation of the run had saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRanks(ForRanks):
    """End all ranks of generations up to this one, and send `RanksReady` once they are gone."""

    generation: int
    grace_s: float
    """How long they may take after SIGTERM; 0 kills them at once."""
    keeps: bool = False
    """Whether those that run attempts only leave theirs: they keep their processes for the next generation. With
    `grace_s` they leave after their next save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReady(FromRanks):
    """No rank of a generation up to this one runs on the node, or will: the next can begin."""

    generation: int
    num_ranks: int
    port: int
    """A free port, which the agent keeps for rank 0."""
    address: str = ""
    """Where ranks of other nodes reach it: for a network interface, that one's address."""
    door: CopyDoor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStarted(FromRanks):
    """The processes of the node's ranks exist."""

    generation: int
    pids: tuple[int, ...]
    """In the order of local ranks."""
    is_warm: bool
    """Whether they were forked from a process with the imports of earlier ranks."""
    num_kept: int = 0
    """How many of them were there before: survivors of the generation before, and spares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLosses:
    """The step of a script that no rank has saved, because losses were not finite, or jumped."""

    step: int
    start: str
    is_redone: bool
    """Whether the script asked for the step to be computed again, on other nodes."""
    losses: tuple[tuple[int, str], ...]
    """(rank, loss as text) of the ranks whose own losses are bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """Why a rank failed, as far as that is known."""

    message: str
    """The last line of its traceback, or the text of its error file."""
    detail: str = ""
    """Its traceback, or else the end of its standard error."""
    is_exception: bool = False
    """Whether a Python exception ended it; else `message` is only its last output."""
    has_lost_states: bool = False
    """Whether no node has the states any more that its run had saved, so that another start would not help."""
    bad: BadLosses | None = None
    """The bad losses over which it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed(FromRanks):
    """A rank was killed, or ended with another status than 0."""

    generation: int
    rank: int
    local_rank: int
    pid: int
    end: ProcessEnd
    error: RankError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFinished(FromRanks):
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksCold(FromRanks):
    """The process that had imported ahead is lost: until there is another, ranks start cold."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksUnwritten(FromRanks):
    """A rank could not write to one of its files; its output is still shown."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksQuiet(FromRanks):
    """Whether the node's ranks have shown no sign of life for too long; sent when it changes."""

    generation: int
    is_quiet: bool
    has_shown: bool
    """Whether there was any sign in this generation: something printed, or saved."""
    idle: tuple[int, ...]
    """Ranks that have used next to no processor time since the last sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRanks(ForRanks):
    """Report where the ranks of a generation are."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """What torch's flight recorder of a rank has of one of its process groups."""

    group: str
    ranks: tuple[int, ...]
    num_joined: int
    """How many of the group's collectives it has joined."""
    what: str
    """The newest of these; empty before the first."""
    is_waiting: bool
    """Whether that has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """What a rank writes of its flight recorder, for its agent."""

    groups: tuple[GroupRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacks(FromRanks):
    """The stacks of the node's ranks, as (rank, stack); empty where a rank wrote none."""

    generation: int
    stacks: tuple[tuple[int, str], ...]
    groups: tuple[tuple[int, tuple[GroupRecord, ...]], ...] = ()
    """The process groups of each rank whose flight recorder is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesHeld(FromRanks):
    """All parts of states that the node holds now; sent when they change."""

    parts: tuple[HeldPart, ...]
    parities: tuple[HeldParity, ...] = ()
    kept: int = 0
    """The number of the newest `KeepStates` that was in force before the node looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepStates(ForRanks):
    """Overwrite none of these states, and remove the copies of older starts than theirs."""

    number: int
    """Counts these orders of the run."""
    states: tuple[ScriptState, ...]
    from_step: int | None
    """Keep the first state, too, that ranks of the generation save from this step on: it is to be copied."""
    start: str = ""
    """Identifies that generation, as in `StartRanks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesKept(FromRanks):
    """What an earlier master had a node keep; sent whenever a master reaches it again, before `StatesHeld`."""

    door: CopyDoor | None
    order: KeepStates | None
    """The newest one; None where there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyParts(ForRanks):
    """Send parts of a state to other nodes."""

    state: ScriptState
    parts: tuple[PartCopies, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNotCopied(FromRanks):
    """A part did not reach the node `target`."""

    state: ScriptState
    rank: int
    target: str
    reason: str
    is_gone: bool
    """Whether it was overwritten, so that no other try would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNotWritten(FromRanks):
    """A part of a state could not be written to disk."""

    state: ScriptState
    rank: int
    is_sharded: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput(FromRanks):
    """A rank's output, to show where the run was started."""

    rank: int
    is_error: bool
    text: str
    """Whole lines, but for the last one of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BecomeRank:
    """What an agent sends to a process that was forked to be a rank."""

    entry: Literal["script", "module", "program"]
    command: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    stdout: str
    stderr: str
    """File names, both."""
    logs_imports: bool
    """Whether it notes its imports, for the process that forks later ranks."""
    is_spare: bool = False
    """Whether it only runs up to its attempts, and waits there for a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptRank:
    """What an agent sends to a rank that is to leave its attempt."""

    after_save: bool
    """Whether it may go on until its next save."""


RanksOrder = ConfigureRanks | StartRanks | EndRanks | TraceRanks | KeepStates | CopyParts
RanksReport = (
    RanksReady
    | RanksStarted
    | RankFailed
    | RanksFinished
    | RanksUnwritten
    | RanksCold
    | RanksQuiet
    | RankStacks
    | StatesHeld
    | StatesKept
    | PartNotCopied
    | PartNotWritten
    | RankOutput
)
