"""A run as the journal of a dead master knows it: enough for another master to take over.

Training continues without a master. Its successor knows the plans and the members from the journal, and learns from the
agents what happened since. Only what it needs is kept, so that a run of a year takes no more room than one of an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oobleck.control import journal
from oobleck.control.checkpoints import KnownCheckpoint
from oobleck.control.data import ShardRemains
from oobleck.control.nodes import MemberImage, Membership, MemberState
from oobleck.control.protocol import CommitRecord
from oobleck.control.steps import STEPS_TIMED, PlanHistory
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import NodeKind, WorkerId, profile_from_json


@dataclass(slots=True)
class ReplayedRun:
    """A run without a master, as its journal knows it. `apply` takes each further entry: O(1), except for plans."""

    started: journal.JobStarted
    members: Membership
    generations: PlanHistory
    profiles: dict[str, journal.ProfileKnown] = field(default_factory=dict)
    plans: list[journal.PlanAdopted] = field(default_factory=list)
    """The plans that `generations` needs, and those that are named below."""
    records: deque[CommitRecord] = field(default_factory=lambda: deque(maxlen=STEPS_TIMED))
    predicted_step_s: float = 0.0
    """By the newest plan."""
    slow: dict[str, float] = field(default_factory=dict)
    """The multiple of the usual time that each slow node takes."""
    evaluated_step: int = 0
    furthest_step: int = 0
    """The newest step that was ever committed, including lost ones."""
    began: journal.PlanAdopted | None = None
    restored: journal.PlanAdopted | None = None
    """The newest plan that went back to a checkpoint, or to the model's initial values."""
    origin: str | None = None
    saved: list[KnownCheckpoint] = field(default_factory=list)
    target: int | None = None
    """The number of nodes to train on; None for all."""
    shards: ShardRemains = field(default_factory=ShardRemains)
    last_s: float = 0.0
    gap: journal.JournalGap | None = None
    """Why the journal is incomplete; None if it is not."""
    interrupted: tuple[NodeSpec, ...] = ()
    """Nodes that were joining, and had no part in any plan."""

    @classmethod
    def begun(cls, started: journal.JobStarted) -> ReplayedRun:
        """Return the run after its first entry."""
        return cls(started, Membership(started.nodes), PlanHistory(max_steps=started.job.max_steps), last_s=started.t_s)

    @classmethod
    def of_image(
        cls, image: ReplayImage, started: journal.JobStarted, profiles: Sequence[journal.ProfileKnown]
    ) -> ReplayedRun:
        """Continue from an image."""
        run = cls.begun(started)
        run.members, run.profiles = Membership.of_image(image.members), {known.kind: known for known in profiles}
        run.plans.extend(image.plans)
        for plan in image.plans:
            run.generations.restore(plan)
        run.generations.current = image.generation
        run.records.extend(image.records)
        run.predicted_step_s, run.slow = image.predicted_step_s, dict(image.slow)
        run.evaluated_step, run.furthest_step = image.evaluated_step, image.furthest_step
        of = {plan.generation: plan for plan in image.plans}
        run.began = None if image.began is None else of[image.began]
        run.restored = None if image.restored is None else of[image.restored]
        run.origin, run.saved, run.target = image.origin, list(image.saved), image.target
        run.shards = image.shards
        run.last_s, run.gap = image.last_s, image.gap
        return run

    def image(self) -> ReplayImage:
        """Return all that the run knows, for `of_image`."""
        return ReplayImage(
            members=self.members.image(),
            generation=self.generations.current,
            plans=tuple(self.plans),
            records=tuple(self.records),
            predicted_step_s=self.predicted_step_s,
            slow=tuple(self.slow.items()),
            evaluated_step=self.evaluated_step,
            furthest_step=self.furthest_step,
            began=None if self.began is None else self.began.generation,
            restored=None if self.restored is None else self.restored.generation,
            origin=self.origin,
            saved=tuple(self.saved),
            target=self.target,
            shards=self.shards,
            last_s=self.last_s,
            gap=self.gap,
        )

    def apply(self, entry: journal.JournalEntry) -> None:
        _apply(self, entry)
        self.last_s = entry.t_s

    def finish(self) -> ReplayedRun | None:
        """Return this run if it ever trained, or None. No entry follows."""
        if not self.profiles or not self.generations.plans:
            return None
        _interrupt_joining(self)
        return self

    @property
    def job(self) -> JobSpec:
        return self.started.job

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """The nodes that had a part in the run when the journal ended."""
        return tuple(member.spec for member in self.members.in_state(MemberState.READY, MemberState.CONNECTED))

    @property
    def kinds(self) -> tuple[NodeKind, ...]:
        return tuple(
            NodeKind(
                name=known.kind,
                profile=profile_from_json(known.profile_json, source="the journal's profile"),
                devices_per_node=known.num_devices,
            )
            for known in self.profiles.values()
        )

    def relocate(self, specs: Mapping[str, NodeSpec]) -> None:
        """Update where to reach nodes: virtual nodes have other ports under each master."""
        self.members.relocate(specs)
        self.interrupted = tuple(specs.get(spec.name, spec) for spec in self.interrupted)

    @property
    def is_settled(self) -> bool:
        """Whether all have certainly received the newest orders: a step was committed under them."""
        newest = self.generations.newest
        return self.generations.current == newest and any(record.generation == newest for record in self.records)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayImage:
    """All that a `ReplayedRun` knows, except for its first entry and its profiles."""

    members: tuple[MemberImage, ...]
    generation: int
    plans: tuple[journal.PlanAdopted, ...]
    records: tuple[CommitRecord, ...]
    predicted_step_s: float
    slow: tuple[tuple[str, float], ...]
    evaluated_step: int
    furthest_step: int
    began: int | None
    """Its generation, as of the next one."""
    restored: int | None
    origin: str | None
    saved: tuple[KnownCheckpoint, ...]
    target: int | None
    shards: ShardRemains
    last_s: float
    gap: journal.JournalGap | None


def _interrupt_joining(replayed: ReplayedRun) -> None:
    # A successor starts again with the nodes that the dead master was taking in.
    joining = [
        *replayed.members.in_state(MemberState.CONNECTING),
        *(member for member in replayed.members.in_state(MemberState.CONNECTED) if not member.restarts),
    ]
    for member in joining:
        replayed.members.lose(member.spec.name)
    replayed.interrupted = tuple(member.spec for member in joining)


def _apply(replayed: ReplayedRun, entry: journal.JournalEntry) -> None:
    match entry:
        case journal.MasterResumed():
            _interrupt_joining(replayed)
        case journal.ProfileKnown():
            replayed.profiles[entry.kind] = entry
        case journal.PlanAdopted():
            _restore_plan(replayed, entry)
        case journal.CheckpointSaved():
            is_final = entry.step >= replayed.job.max_steps
            replayed.saved.append(
                KnownCheckpoint(name=entry.name, step=entry.step, saved_at=entry.saved_at, is_final=is_final)
            )
            del replayed.saved[: -replayed.job.checkpoint.save_total_limit]  # Older ones are removed by now.
        case journal.PaceChanged(node=node, factor=factor) if factor > 1:
            replayed.slow[node] = factor
        case journal.PaceChanged(node=node):
            replayed.slow.pop(node, None)
        case journal.ScalingDecided(num_nodes=num_nodes):
            replayed.target = num_nodes
        case journal.JournalGap():
            replayed.gap = entry if entry.is_open or entry.num_lost else None
        case journal.StepDone(record=record):
            replayed.records.append(record)
            replayed.furthest_step = max(replayed.furthest_step, record.step)
        case journal.Evaluated(step=step):
            replayed.evaluated_step = step
        case journal.ShardsKnown() | journal.DataPlaced() | journal.RecordsDealt() | journal.ShardQuarantined():
            replayed.shards.note(entry)
        case journal.RecoveryStarted(generation=generation, cause=cause, nodes=nodes):
            replayed.generations.current = generation
            if cause is journal.PlanCause.DRAINED:
                for node in nodes:
                    replayed.members.drain(node)
            if cause is journal.PlanCause.RETRIED:
                for node in nodes:
                    replayed.slow.pop(node, None)
        case journal.NodeAdded(node=spec):
            replayed.members.add(spec)
        case (
            journal.NodeConnected()
            | journal.WorkerUp()
            | journal.WorkerDown()
            | journal.NodeLost()
            | journal.NodeLeft()
        ):
            _move(replayed, entry)
            if isinstance(entry, journal.WorkerDown | journal.NodeLost | journal.NodeLeft):
                replayed.slow.pop(entry.node, None)
        case _:
            pass


def _restore_plan(replayed: ReplayedRun, entry: journal.PlanAdopted) -> None:
    replayed.generations.restore(entry)
    replayed.predicted_step_s = entry.predicted_step_s
    replayed.began = replayed.began or entry
    if entry.restored_step is not None:  # Steps and evaluations since do not count any more.
        replayed.restored = entry
        replayed.origin = replayed.origin or entry.restored
        replayed.records.clear()
        replayed.evaluated_step = min(replayed.evaluated_step, entry.restored_step)
    plans = [*replayed.plans, entry]
    finishing = [plan for plan in plans if plan.finish is not None]
    others = [plan for plan in plans if plan.finish is None]
    # Segments of a step are numbered, and no later one may have the same number.
    latest = max(finishing, key=lambda plan: max([part.segment for part in plan.segments], default=-1), default=None)
    needed = (replayed.began, replayed.restored, latest, *finishing[-1:], *others[-1:])
    generations = {*replayed.generations.plans, *(plan.generation for plan in needed if plan is not None)}
    replayed.plans = [plan for plan in plans if plan.generation in generations]


def _move(
    replayed: ReplayedRun,
    entry: journal.NodeConnected | journal.WorkerUp | journal.WorkerDown | journal.NodeLost | journal.NodeLeft,
) -> None:
    members = replayed.members
    match entry:
        case journal.NodeConnected(node=node, agent_pid=pid):
            members.note_connected(node, agent_pid=pid)
        case journal.WorkerUp():
            members.note_ready(entry, generation=replayed.generations.current)
        case journal.WorkerDown(node=node, device=device, pid=pid, also=also):
            worker_id = WorkerId(node=node, device=device)
            members.note_restart(worker_id, pid, now_s=entry.t_s, step=replayed.furthest_step, also=also)
        case journal.NodeLost(node=node):
            members.lose(node)
        case journal.NodeLeft(node=node):
            members.leave(node)
