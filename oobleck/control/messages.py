"""The protocol: one frozen dataclass for each line that master, agent and worker say to each other.

A worker speaks to the master through its agent, which relays what it does not handle itself. `device` is
the worker's device on its node. Generations are strictly increasing; whoever receives an order or an answer
of an old generation drops it. Steps count from 1: `applied == k` means that k optimizer steps were applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, Place

__all__ = [
    "PROTOCOL_VERSION",
    "AgentMessage",
    "AgentStopped",
    "CommitRecord",
    "Configure",
    "Fence",
    "FinishStep",
    "Finished",
    "Heartbeat",
    "Hello",
    "MasterMessage",
    "Order",
    "PeerFailed",
    "ProfileRequest",
    "Profiled",
    "Resolution",
    "Segment",
    "SetUpWorker",
    "StartWorker",
    "Status",
    "StepCommitted",
    "StopAgent",
    "StorePut",
    "TransferItem",
    "WorkerBound",
    "WorkerExited",
    "WorkerFailed",
    "WorkerMessage",
    "WorkerReady",
    "WorkerStarted",
]

PROTOCOL_VERSION = 1


# --- agent -> master ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first frame on a connection: who the agent is, and whether it fits."""

    protocol: int
    oobleck_version: str
    python_version: str
    node: str
    pid: int
    generation: int
    """The newest generation that this agent's workers have adopted; 0 for none."""
    device_memory_bytes: int
    """Memory that one device of this node offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Said by the agent every interval, and answered by the master with the same sequence number."""

    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted:
    """A worker process exists."""

    device: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A worker has its data and its model's structure, and waits for an order."""

    device: int
    pid: int
    data_digest: str
    """Equal on all nodes, or they would train on different text."""
    num_samples: int
    layer_names: tuple[str, ...]
    parameters: int
    """Number of the model's parameters, tied ones counted once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker process is gone; at most one of `exit_code` and `signal` is set."""

    device: int
    pid: int
    exit_code: int | None = None
    signal: int | None = None
    traceback: str | None = None
    """The Python exception that ended it, if one did."""

    @property
    def reason(self) -> str:
        """The end in plain words."""
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        if self.traceback:
            return self.traceback.strip().splitlines()[-1]
        return f"exit code {self.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The measured profile of the model, as the JSON of a profile file."""

    device: int
    profile_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """What is known of a committed step once it is committed: equal on every rank."""

    step: int
    generation: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_samples: int
    samples_repeated: int
    samples_missing: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """A worker has applied a step. The first stage of each pipeline says so: the record survives f failures."""

    device: int
    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The answer to a fence: nothing of an older generation will be committed by this worker any more."""

    device: int
    generation: int
    """The fence's."""
    applied: int
    """Steps applied."""
    last_record: CommitRecord | None
    reduced: int | None
    """The step whose fully reduced gradients this worker holds and has not applied."""
    in_flight: int | None
    """The step it has begun and not applied."""
    adopted: int
    """The newest generation whose plan it has adopted, transfers included; 0 for none."""
    layers: tuple[int, ...]
    """The layers it holds whole, at version `applied`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFailed:
    """A collective or a transfer failed under this worker: a suspicion, to be checked."""

    device: int
    generation: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePut:
    """A rendezvous key; the master passes it on to the nodes that want it, their agents to their workers."""

    key: str
    value: bytes
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A worker has applied the last step, or the one it was to stop after."""

    device: int
    applied: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """A worker's last word: the Python exception that ends it. The agent reports it with the exit."""

    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStopped:
    """The agent has ended its workers and leaves now."""

    reason: str


# --- master -> agent and worker ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure:
    """The master's answer to the hello."""

    protocol: int
    oobleck_version: str
    job: JobSpec
    node: str
    devices: tuple[int, ...]
    torch_threads: int
    """Threads that each worker of this node computes with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start the worker of a device."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Measure the model's layers on this device."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """From now on commit nothing of an older generation; answer with a status.

    Workers of pipelines with a lost node stop what they do; the others finish their microbatches, and
    nobody waits for a reduction any more.
    """

    device: int
    generation: int
    lost: tuple[str, ...]
    """Nodes lost since the newest plan."""


class Resolution(StrEnum):
    """What becomes of the step in flight."""

    NONE = "none"
    """There is none."""
    APPLY = "apply"
    """Somebody has applied it, so all hold its reduced gradients: apply it."""
    FINISH = "finish"
    """The whole pipelines add the broken ones' microbatches; then reduce, commit, apply."""
    REDO = "redo"
    """Forget it; it is run again under the new plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An extra program of a whole pipeline: microbatches of the step in flight that a broken one leaves."""

    segment: int
    """Identifies the segment; increasing."""
    pipeline: int
    """Index in the plan under which the step was begun."""
    microbatches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferItem:
    """Part `part` of `num_parts` of a layer's state goes from `source` to `target`."""

    layer: int
    source: Place
    target: Place
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Resolve the step in flight; then adopt the plan and train on."""

    device: int
    generation: int
    resolution: Resolution
    step: int
    """The step to be resolved, or the last one applied when there is nothing to resolve."""
    lost: tuple[str, ...]
    """Nodes of the old plan that take no part in the resolution any more."""
    segments: tuple[Segment, ...] = ()
    """With FINISH: all extra segments of this step so far."""
    plan: ExecutionPlan
    initial: bool = False
    """Layers that no transfer brings take their initial values: the job's first order."""
    transfers: tuple[TransferItem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStep:
    """Commit the step in flight, then train no further. The commit itself makes all workers agree on it."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAgent:
    """End the workers, then yourself."""

    reason: str


# --- agent -> worker ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUpWorker:
    """The first frame a worker receives: everything it needs before its first order."""

    job: JobSpec
    place: Place
    torch_threads: int
    cache_dir: str
    device_memory_bytes: int


AgentMessage = (
    Hello
    | Heartbeat
    | WorkerStarted
    | WorkerReady
    | WorkerExited
    | Profiled
    | StepCommitted
    | Status
    | PeerFailed
    | StorePut
    | Finished
    | AgentStopped
)
"""What an agent says to the master, its workers' words included."""

MasterMessage = Configure | Heartbeat | StartWorker | ProfileRequest | Fence | Order | StorePut | FinishStep | StopAgent
"""What the master says to an agent and, through it, to workers."""

WorkerMessage = WorkerReady | Profiled | StepCommitted | Status | PeerFailed | StorePut | Finished | WorkerFailed
"""What a worker says to its agent."""

WorkerBound = SetUpWorker | ProfileRequest | Fence | Order | StorePut | FinishStep
"""What an agent says to a worker."""
