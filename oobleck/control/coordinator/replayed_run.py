"""What the journal of a master that died says of its run: enough for another master to take over.

Training continues without a master. The one that takes over knows the plans and the members from the journal, and
learns from the agents what happened since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from oobleck.control.checkpoints import KnownCheckpoint
from oobleck.control.commit import Generations
from oobleck.control.data import ShardRemains
from oobleck.control.journal import (
    CheckpointSaved,
    DataPlaced,
    Evaluated,
    JobEnded,
    JobStarted,
    JournalEntry,
    JournalGap,
    MasterResumed,
    NodeAdded,
    NodeConnected,
    NodeLeft,
    NodeLost,
    PaceChanged,
    PlanAdopted,
    PlanCause,
    ProfileKnown,
    RecordsDealt,
    RecoveryStarted,
    ScalingDecided,
    ShardQuarantined,
    ShardsKnown,
    StepDone,
    WorkerDown,
    WorkerUp,
)
from oobleck.control.membership import Membership, MemberState
from oobleck.control.protocol import CommitRecord
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import Profile, WorkerId, profile_from_json

__all__ = ["ReplayedRun", "replay_run"]


@dataclass(slots=True)
class ReplayedRun:
    """A run without a master, as its journal knows it."""

    started: JobStarted
    members: Membership
    generations: Generations
    profile_json: str = ""
    records: list[CommitRecord] = field(default_factory=list)
    """Of all committed steps that are known."""
    predicted_step_s: float = 0.0
    """Of the newest plan."""
    slow: dict[str, float] = field(default_factory=dict)
    """How many times the usual time slow nodes take."""
    evaluated_step: int = 0
    """The newest whose evaluation is known."""
    furthest_step: int = 0
    """The newest step that was ever committed, lost ones included."""
    began: PlanAdopted | None = None
    """The first plan."""
    restored: PlanAdopted | None = None
    """The newest plan that went back to a checkpoint, or to the model's initial values."""
    origin: str | None = None
    """The checkpoint that the run began from."""
    saved: list[KnownCheckpoint] = field(default_factory=list)
    target: int | None = None
    """On how many nodes the run is to train; None: all."""
    shards: ShardRemains = field(default_factory=ShardRemains)
    last_s: float = 0.0
    """When the last entry was made."""
    gap: JournalGap | None = None
    """Why the journal does not know all that happened; None where it does."""
    interrupted: tuple[NodeSpec, ...] = ()
    """Nodes that were joining, and had no part in any plan."""

    @property
    def job(self) -> JobSpec:
        return self.started.job

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """The nodes that had a part in the run when the journal ended."""
        return tuple(member.spec for member in self.members.in_state(MemberState.READY, MemberState.CONNECTED))

    @property
    def profile(self) -> Profile:
        return profile_from_json(self.profile_json, source="the journal's profile")

    def relocate(self, specs: Mapping[str, NodeSpec]) -> None:
        """Reach nodes as these say, where they may have changed: virtual nodes have other ports under each master."""
        self.members.relocate(specs)
        self.interrupted = tuple(specs.get(spec.name, spec) for spec in self.interrupted)

    @property
    def is_settled(self) -> bool:
        """Whether all have certainly received the newest orders: a step was committed under them."""
        newest = self.generations.newest
        return self.generations.current == newest and any(record.generation == newest for record in self.records)


def replay_run(entries: Iterable[JournalEntry]) -> ReplayedRun | None:
    """Put together what is left of a run; None when it has ended, or never came to train. O(entries)."""
    replayed: ReplayedRun | None = None
    for entry in entries:
        if isinstance(entry, JobStarted):
            replayed = ReplayedRun(entry, Membership(entry.nodes), Generations(max_steps=entry.job.max_steps))
        elif isinstance(entry, JobEnded) or replayed is None:
            return None
        else:
            _apply(replayed, entry)
        replayed.last_s = entry.t_s
    if replayed is None or not replayed.profile_json or not replayed.generations.plans:
        return None
    _interrupt_joining(replayed)
    return replayed


def _interrupt_joining(replayed: ReplayedRun) -> None:
    """The nodes that the dead master was taking in: its successor starts that again from the beginning."""
    joining = [
        *replayed.members.in_state(MemberState.CONNECTING),
        *(member for member in replayed.members.in_state(MemberState.CONNECTED) if not member.restarts),
    ]
    for member in joining:
        replayed.members.lose(member.spec.name)
    replayed.interrupted = tuple(member.spec for member in joining)


def _apply(replayed: ReplayedRun, entry: JournalEntry) -> None:
    match entry:
        case MasterResumed():
            _interrupt_joining(replayed)
        case ProfileKnown(profile_json=profile_json):
            replayed.profile_json = profile_json
        case PlanAdopted():
            replayed.generations.restore(entry)
            replayed.predicted_step_s = entry.predicted_step_s
            replayed.began = replayed.began or entry
            if entry.restored_step is not None:
                replayed.restored = entry
                replayed.origin = replayed.origin or entry.restored
                replayed.records.clear()
                replayed.evaluated_step = min(replayed.evaluated_step, entry.restored_step)
        case CheckpointSaved():
            is_final = entry.step >= replayed.job.max_steps
            replayed.saved.append(
                KnownCheckpoint(name=entry.name, step=entry.step, saved_at=entry.saved_at, is_final=is_final)
            )
        case PaceChanged(node=node, factor=factor) if factor > 1:
            replayed.slow[node] = factor
        case PaceChanged(node=node):
            replayed.slow.pop(node, None)
        case ScalingDecided(num_nodes=num_nodes):
            replayed.target = num_nodes
        case JournalGap():
            replayed.gap = entry if entry.is_open or entry.num_lost else None
        case StepDone(record=record):
            replayed.records.append(record)
            replayed.furthest_step = max(replayed.furthest_step, record.step)
        case Evaluated(step=step):
            replayed.evaluated_step = step
        case ShardsKnown() | DataPlaced() | RecordsDealt() | ShardQuarantined():
            replayed.shards.note(entry)
        case RecoveryStarted(generation=generation, cause=cause, nodes=nodes):
            replayed.generations.current = generation
            if cause is PlanCause.DRAINED:
                for node in nodes:
                    replayed.members.drain(node)
            if cause is PlanCause.RETRIED:
                for node in nodes:
                    replayed.slow.pop(node, None)
        case NodeAdded(node=spec):
            replayed.members.add(spec)
        case NodeConnected() | WorkerUp() | WorkerDown() | NodeLost() | NodeLeft():
            _move(replayed, entry)
            if isinstance(entry, WorkerDown | NodeLost | NodeLeft):
                replayed.slow.pop(entry.node, None)
        case _:
            pass


def _move(replayed: ReplayedRun, entry: NodeConnected | WorkerUp | WorkerDown | NodeLost | NodeLeft) -> None:
    members = replayed.members
    match entry:
        case NodeConnected(node=node, agent_pid=pid):
            members.note_connected(node, agent_pid=pid)
        case WorkerUp():
            members.note_ready(entry, generation=replayed.generations.current)
        case WorkerDown(node=node, device=device, pid=pid, also=also):
            worker_id = WorkerId(node=node, device=device)
            members.note_restart(worker_id, pid, now_s=entry.t_s, step=replayed.furthest_step, also=also)
        case NodeLost(node=node):
            members.lose(node)
        case NodeLeft(node=node):
            members.leave(node)
