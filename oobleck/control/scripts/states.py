"""The values of the generations' state machine: its states, its inputs and its effects.

`machine.py` has the transitions, and the one function that makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
    """How long ranks may take to end when asked to, where none has failed."""
    patience_s: float
    """How long an agent may take beyond that to report that they are gone."""
    node_unit: int = 1
    """The number of nodes of any generation is a multiple of this."""

    @property
    def most_nodes(self) -> int:
        return self.most_of(self.max_nodes)

    @property
    def fewest_nodes(self) -> int:
        """The least multiple of `node_unit` that is not below `min_nodes`."""
        return max(1, -(-self.min_nodes // self.node_unit)) * self.node_unit

    def most_of(self, num_nodes: int) -> int:
        """How many of `num_nodes` can take part."""
        usable = min(num_nodes, self.max_nodes)
        return usable - usable % self.node_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node that can take part in the next generation: nothing runs there."""

    node: str
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Which nodes are present: what the machine knows besides its own state."""

    candidates: tuple[Candidate, ...] = ()
    """In the hostfile's order."""
    num_expected: int = 0
    """Nodes on their way, which cannot take part yet."""
    has_saved: bool = False
    """Whether all ranks of the newest generation have saved a state."""


# --- states ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What every state knows of the generations so far."""

    generation: int = 0
    num_failures: int = 0
    """Generations that ended because a rank failed."""
    num_fruitless: int = 0
    """How many of the last ones kept processes and ended in a failure before any state was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """No rank runs, and the run waits for nodes."""

    past: Past
    cause: GenerationCause
    """Why there is another generation."""
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

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.node for each in self.nodes)

    @property
    def unfinished(self) -> tuple[str, ...]:
        return tuple(node for node in self.names if node not in self.finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking(Running):
    """No rank shows a sign of life: all are asked where they are, until `due_s`. A generation in it still runs."""

    due_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The agents end all ranks."""

    past: Past
    cause: GenerationCause
    waits_for: frozenset[str]
    """Nodes that have not reported yet that their ranks are gone."""
    due_s: float
    """When those nodes are given up."""
    then: EndRun | None = None
    """None: another generation follows."""
    keeps: bool = False
    """As in `Clear`."""
    is_unexplained: bool = False
    """Whether a rank has failed, which a node may explain that turns out to be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The run has ended."""

    past: Past


State = Gathering | Running | Asking | Ending | Over


# --- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A node reports that no rank of a generation up to this one runs there."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A node is lost, or has left."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A node is being drained."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A rank of a node has failed, or holds all others up; `reason` tells people which and how."""

    node: str
    generation: int
    reason: str
    is_hang: bool = False
    is_final: bool = False
    """Whether it would fail again at every start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All ranks of a node have ended well."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """The user ends the run; `now` waits for nothing."""

    end: EndRun
    now: bool


class Signal(StrEnum):
    """An input without any value."""

    TIME_PASSED = "time_passed"
    """The state's deadline may have come."""
    QUIET = "quiet"
    """No rank shows a sign of life, as if all hung."""
    STIRRED = "stirred"
    """Ranks show one again, or have ended: they do not hang."""


Input = Ready | Gone | Leave | Failed | Finished | StopAsked | Signal


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Start the ranks of a generation."""

    generation: int
    cause: GenerationCause
    nodes: tuple[NodeRanks, ...]
    num_failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask the ranks of these nodes where they are."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """End the ranks of a generation on these nodes."""

    generation: int
    cause: GenerationCause
    nodes: tuple[str, ...]
    about: tuple[str, ...]
    grace_s: float
    keeps: bool
    """Whether ranks that can take part in the next generation keep their processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo:
    """Nothing runs any more on a node that is being drained."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpSilent:
    """These nodes did not report in time that their ranks are gone."""

    nodes: tuple[str, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TooFew:
    """The run waits for `num_missing` more nodes, until `until_s`."""

    num_missing: int
    until_s: float


Effect = Begin | Ask | Clear | LetGo | GiveUpSilent | TooFew | EndRun
