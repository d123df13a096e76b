"""The values of the generations' state machine: its states, its inputs and its effects.

`machine.py` has the transitions, and the one function that makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.control.events import EndRun
from oobleck.control.journal import GenerationCause, NodeRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the user allows."""

    min_nodes: int
    max_nodes: int
    max_restarts: int
    waits_for_all_s: float
    """How long the first generation waits for nodes that are on their way."""
    waits_for_min_s: float
    """How long any waits for `min_nodes`."""
    grace_s: float
    """How long ranks may take that are asked to end, where none has failed."""
    patience_s: float
    """How long an agent may take beyond that to report that they are gone."""
    node_unit: int = 1
    """A generation has a multiple of so many nodes."""

    @property
    def most_nodes(self) -> int:
        """The largest generation."""
        return self.most_of(self.max_nodes)

    @property
    def fewest_nodes(self) -> int:
        """The smallest generation: the least multiple of `node_unit` that is not below `min_nodes`."""
        return max(1, -(-self.min_nodes // self.node_unit)) * self.node_unit

    def most_of(self, num_nodes: int) -> int:
        """How many of so many nodes can take part."""
        usable = min(num_nodes, self.max_nodes)
        return usable - usable % self.node_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node that can take part in the next generation: nothing runs there."""

    node: str
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who is there, beside the machine's own state."""

    candidates: tuple[Candidate, ...] = ()
    """In the hostfile's order."""
    num_expected: int = 0
    """Nodes on their way, which cannot take part yet."""


# --- states ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What has been so far."""

    generation: int = 0
    """The newest one."""
    num_failures: int = 0
    """Generations that ended because a rank failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """No rank runs; nodes are waited for."""

    past: Past
    cause: GenerationCause
    """Of the generation to come."""
    since_s: float
    tells_s: float
    """When to report next how many nodes are missing, if any are."""
    is_late: bool = False
    """Whether a start waits on after the first of its two timeouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The ranks of `past.generation` run."""

    past: Past
    nodes: tuple[NodeRanks, ...]
    finished: frozenset[str] = frozenset()
    """Nodes whose ranks have all ended well."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.node for each in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Ranks are being ended everywhere."""

    past: Past
    cause: GenerationCause
    waits_for: frozenset[str]
    """Nodes that have not said yet that theirs are gone."""
    due_s: float
    """When they are given up."""
    then: EndRun | None = None
    """None: another generation follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The run has ended."""

    past: Past


State = Gathering | Running | Ending | Over


# --- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A node has said that no rank of a generation up to this one runs there."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A node is lost, or has left."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A node is to leave."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A rank of a node has failed, or holds all others up; `reason` says which and how, for people."""

    node: str
    generation: int
    reason: str
    is_hang: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All ranks of a node have ended well."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """The user wants an end; `now` waits for nothing."""

    end: EndRun
    now: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The state's deadline may have come."""


Input = Ready | Gone | Leave | Failed | Finished | StopAsked | TimePassed


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Have the ranks of a generation started."""

    generation: int
    cause: GenerationCause
    nodes: tuple[NodeRanks, ...]
    num_failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """A generation ends: have its ranks ended on these nodes."""

    generation: int
    cause: GenerationCause
    nodes: tuple[str, ...]
    about: tuple[str, ...]
    """Nodes that are the reason."""
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo:
    """A node that was to leave has no part in anything any more."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpSilent:
    """These nodes have not said in time that their ranks are gone."""

    nodes: tuple[str, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TooFew:
    """So many more nodes are waited for, until then."""

    num_missing: int
    until_s: float


Effect = Begin | Clear | LetGo | GiveUpSilent | TooFew | EndRun
