"""A run at one moment, for people: plain values, ready to be drawn or sent as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

# Nothing else of the package is imported, so that commands that only show a run start quickly.
from oobleck.errors import ExitCode


class RunState(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    RECONFIGURING = "reconfiguring"
    WAITING = "waiting"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


_RESUMABLE = frozenset({ExitCode.NOT_SAVED, ExitCode.RESUMABLE, ExitCode.INTERRUPTED, ExitCode.TERMINATED})


def state_at_end(exit_code: int, *, is_whole: bool) -> RunState:
    """Return how a run has ended; `is_whole`: it has done all its steps, and was not stopped before."""
    if exit_code == ExitCode.DONE:
        return RunState.DONE if is_whole else RunState.STOPPED
    return RunState.STOPPED if exit_code in _RESUMABLE else RunState.FAILED


class WorkState(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    RECONFIGURING = "reconfiguring"
    LOST = "lost"
    ENDED = "ended"


class NodeState(StrEnum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    READY = "ready"
    """Its workers wait for a plan."""
    TRAINING = "training"
    SPARE = "spare"
    LOST = "lost"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """Layers [first_layer, stop_layer) on a node, and those of further chunks."""

    node: str
    first_layer: int
    stop_layer: int
    more_chunks: tuple[tuple[int, int], ...] = ()
    """[first layer, stop layer) of each chunk after the first, where the pipeline is interleaved."""
    num_devices: int
    state: WorkState

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        return (self.first_layer, self.stop_layer), *self.more_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineView:
    """A pipeline's stages, in the order of their first layers, and its microbatches in each step."""

    num_microbatches: int
    stages: tuple[StageView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UseView:
    """What a node's processes use; `devices` has (share of time, bytes used, bytes there) of each GPU."""

    cores: float
    num_cores: int
    used_bytes: int
    memory_bytes: int
    devices: tuple[tuple[float, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node of the job; `heard_s_ago` is None where nothing listens for its heartbeats."""

    name: str
    state: NodeState
    heard_s_ago: float | None
    origin: str = ""
    """What provided it; empty for a node that a user named."""
    kind: str = ""
    """Its devices, and how many; empty where all nodes are alike."""
    use: UseView | None = None
    """None where nothing was reported lately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine:
    """An event in plain words; `level` is info, warning or error, `t_s` seconds since the run's start."""

    t_s: float
    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseView:
    """What a run does before its first step; `num_done` of `num_all` nodes or workers have done it, if counted."""

    name: str
    text: str
    num_done: int = 0
    num_all: int = 0
    elapsed_s: float = 0.0

    @property
    def sentence(self) -> str:
        return self.text + (f" ({self.num_done} of {self.num_all})" if self.num_all else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """A run at `elapsed_s` seconds after its start."""

    tag: str = ""
    model: str = ""
    state: RunState = RunState.STARTING
    generation: int = 0
    step: int = 0
    max_steps: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    """Median of the recent steps, like the next one."""
    step_time_s: float | None = None
    losses: tuple[float, ...] = ()
    """From the first step to the newest, each the mean of as many steps; so are the next ones."""
    speeds: tuple[float, ...] = ()
    """Tokens a second."""
    goodput: float = 0.0
    """0 to 1."""
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    redundant: bool = True
    """Whether the run survives a failure without loss of state."""
    fault_threshold: int = 0
    num_recoveries: int = 0
    """Changes of the plan that a fault caused; nodes that join or leave in order do not count."""
    scaling: str = ""
    """How many nodes are to train, and why; empty where all train."""
    pipelines: tuple[PipelineView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    events: tuple[EventLine, ...] = ()
    """The newest ones, oldest first."""
    phase: PhaseView | None = None
    """None from the first step on."""
    exit_code: int | None = None
    data: str | None = None
    """How far the run is in its shards; None where its data is not in shards."""
    protected: str | None = None
    """Which state that a script has saved in memory survives the loss of a node; None where it has saved none."""

    def to_dict(self) -> dict[str, object]:
        """Return the snapshot as JSON-able values: what `oobleck status --json` prints."""
        return asdict(self)
