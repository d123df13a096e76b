"""What the journal of a master that died says of its run: enough for another master to take over.

Training continues without a master. The one that takes over knows the plans and the members from the journal, and
learns from the agents what happened since. Only what it needs is kept, so that a run of a year takes no more room than
one of an hour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oobleck.control import journal
from oobleck.control.checkpoints import KnownCheckpoint
from oobleck.control.data import ShardRemains
from oobleck.control.nodes import Membership, MemberState
from oobleck.control.protocol import CommitRecord
from oobleck.control.steps import STEPS_TIMED, PlanHistory
from oobleck.job import JobSpec, NodeSpec, Sharding, relocated
from oobleck.planner import NodeKind, WorkerId, profile_from_json


@dataclass(slots=True, kw_only=True)
class ReplayedRun:
    """A run without a master, as its journal knows it: follows the entries after the first, O(1) each but for plans.

    A value on the wire, which lacks the plans: `learn` those again.
    """

    started: journal.JobStarted
    members: Membership
    generation: int = 0
    """The newest, ordered or only fenced."""
    generations: PlanHistory = field(init=False, compare=False)
    profiles: dict[str, journal.ProfileKnown] = field(default_factory=dict)
    """Keyed by the kind of node."""
    sharding: Sharding | None = None
    """What devices share out, where the job leaves that to the planner."""
    plans: list[journal.PlanAdopted] = field(default_factory=list, init=False)
    """All that `generations` is restored from, `began` and `restored`; the last one is the newest."""
    records: list[CommitRecord] = field(default_factory=list)
    """The newest known committed steps, `STEPS_TIMED` at most."""
    slow: dict[str, float] = field(default_factory=dict)
    """How many times the usual time slow nodes take."""
    evaluated_step: int = 0
    """The newest whose evaluation is known."""
    furthest_step: int = 0
    """The newest step that was ever committed, lost ones included."""
    began_in: int | None = None
    """The generation of the first plan."""
    restored_in: int | None = None
    """The newest generation whose plan went back to a checkpoint, or to the model's initial values."""
    origin: str | None = None
    """The checkpoint that the run began from."""
    saved: list[KnownCheckpoint] = field(default_factory=list)
    target: int | None = None
    """On how many nodes the run is to train; None: all."""
    num_changes: int = 0
    """The recoveries so far."""
    shards: ShardRemains = field(default_factory=ShardRemains)
    last_s: float = 0.0
    """When the last entry was made."""
    gap: journal.JournalGap | None = None
    """Why the journal does not know all that happened; None where it does."""
    interrupted: tuple[NodeSpec, ...] = field(default=(), init=False, compare=False)
    """Nodes that were joining, and had no part in any plan."""

    def __post_init__(self) -> None:
        self.generations = PlanHistory(max_steps=self.job.max_steps)

    @classmethod
    def begin(cls, started: journal.JobStarted) -> ReplayedRun:
        """Return the run as its first entry has it."""
        return cls(started=started, members=Membership.of(started.nodes), last_s=started.t_s)

    def learn(self, plans: Sequence[journal.PlanAdopted]) -> None:
        """Take in the plans that a value from the wire lacks."""
        self.plans = list(plans)
        for plan in plans:
            self.generations.restore(plan)
        self.generations.current = self.generation

    # --- what another master begins with -------------------------------------------------------------------------

    @property
    def job(self) -> JobSpec:
        return self.started.job

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """The nodes that had a part in the run when the journal ended."""
        return tuple(member.spec for member in self.members.in_state(MemberState.READY, MemberState.CONNECTED))

    @property
    def kinds(self) -> tuple[NodeKind, ...]:
        """The kinds of nodes that the run has a profile of."""
        return tuple(
            NodeKind(
                name=known.kind,
                profile=profile_from_json(known.profile_json, source="the journal's profile"),
                devices_per_node=known.num_devices,
            )
            for known in self.profiles.values()
        )

    @property
    def predicted_step_s(self) -> float:
        return self.plans[-1].predicted_step_s if self.plans else 0.0

    @property
    def began(self) -> journal.PlanAdopted | None:
        return self._plan_of(self.began_in)

    @property
    def restored(self) -> journal.PlanAdopted | None:
        return self._plan_of(self.restored_in)

    def _plan_of(self, generation: int | None) -> journal.PlanAdopted | None:
        return next((plan for plan in self.plans if plan.generation == generation), None)

    def relocate(self, specs: Mapping[str, NodeSpec]) -> None:
        """Reach nodes as these say, where they may have changed: virtual nodes have other ports under each master."""
        self.members.relocate(specs)
        self.interrupted = tuple(relocated(spec, specs) for spec in self.interrupted)

    @property
    def is_settled(self) -> bool:
        """Whether all have certainly received the newest orders: a step was committed under them."""
        newest = self.generations.newest
        return self.generation == newest and any(record.generation == newest for record in self.records)

    def finish(self) -> ReplayedRun | None:
        """Return the run as its journal has left it; None where it never came to train. No entry follows."""
        if not self.profiles or not self.generations.plans:
            return None
        self._interrupt_joining()
        return self

    # --- following the journal -----------------------------------------------------------------------------------

    def apply(self, entry: journal.JournalEntry) -> None:
        self.last_s = entry.t_s
        match entry:
            case journal.MasterResumed():
                self._interrupt_joining()
            case journal.ProfileKnown():
                self.profiles[entry.kind] = entry
            case journal.PlanAdopted():
                self._adopt(entry)
            case journal.CheckpointSaved():
                is_final = entry.step >= self.job.max_steps
                known = KnownCheckpoint(name=entry.name, step=entry.step, saved_at=entry.saved_at, is_final=is_final)
                self.saved.append(known)
                del self.saved[: -self.job.checkpoint.save_total_limit]  # the others are removed by then
            case journal.ShardingChosen(sharding=sharding):
                self.sharding = sharding
            case journal.PaceChanged(node=node, factor=factor) if factor > 1:
                self.slow[node] = factor
            case journal.PaceChanged(node=node):
                self.slow.pop(node, None)
            case journal.ScalingDecided(num_nodes=num_nodes):
                self.target = num_nodes
            case journal.JournalGap():
                self.gap = entry if entry.is_open or entry.num_lost else None
            case journal.StepDone(record=record):
                self.records.append(record)
                del self.records[:-STEPS_TIMED]
                self.furthest_step = max(self.furthest_step, record.step)
            case journal.Evaluated(step=step):
                self.evaluated_step = step
            case journal.ShardsKnown() | journal.DataPlaced() | journal.RecordsDealt() | journal.ShardQuarantined():
                self.shards.note(entry)
            case journal.RecoveryStarted():
                self._begin_recovery(entry)
            case journal.RecoveryDone():
                self.num_changes += 1
            case journal.NodeAdded(node=spec):
                self.members.add(spec)
            case journal.NodeConnected(node=node, agent_pid=pid):
                self.members.note_connected(node, agent_pid=pid)
            case journal.WorkerUp():
                self.members.note_ready(entry, generation=self.generation)
            case journal.WorkerDown(node=node, device=device, pid=pid, also=also):
                worker_id, step = WorkerId(node=node, device=device), self.furthest_step
                self.members.note_restart(worker_id, pid, now_s=entry.t_s, step=step, also=also)
                self.slow.pop(node, None)
            case journal.NodeLost(node=node, is_tried_again=is_tried_again):
                self.members.lose(node, is_tried_again=is_tried_again)
                self.slow.pop(node, None)
            case journal.NodeLeft(node=node):
                self.members.leave(node)
                self.slow.pop(node, None)
            case _:
                pass

    def _interrupt_joining(self) -> None:
        """Lose the nodes that the dead master was taking in: its successor starts that again from the beginning."""
        members = self.members
        joining = [
            *members.in_state(MemberState.CONNECTING),
            *(member for member in members.in_state(MemberState.CONNECTED) if not member.restarts),
        ]
        for member in joining:
            members.lose(member.spec.name)
        self.interrupted = tuple(member.spec for member in joining)

    def _begin_recovery(self, entry: journal.RecoveryStarted) -> None:
        self.generation = self.generations.current = entry.generation
        for node in entry.nodes:
            if entry.cause is journal.PlanCause.DRAINED:
                self.members.drain(node)
            # It counts as a node of usual speed until its reports show otherwise.
            if entry.cause is journal.PlanCause.RETRIED:
                self.slow.pop(node, None)

    def _adopt(self, entry: journal.PlanAdopted) -> None:
        self.generations.restore(entry)
        self.generation = entry.generation
        if self.began_in is None:
            self.began_in = entry.generation
        if entry.restored_step is not None:
            self.restored_in = entry.generation
            self.origin = self.origin or entry.restored
            self.records.clear()
            self.evaluated_step = min(self.evaluated_step, entry.restored_step)
        plans = [*self.plans, entry]
        finishing = [plan for plan in plans if plan.finish is not None]
        others = [plan for plan in plans if plan.finish is None]
        # What is dealt of a step has a number that no later part may have.
        latest = max(
            finishing, key=lambda plan: max([part.segment for part in plan.segments], default=-1), default=None
        )
        needed = {plan.generation for plan in (latest, *finishing[-1:], *others[-1:]) if plan is not None}
        kept = {*self.generations.plans, *needed, self.began_in, self.restored_in}
        self.plans = [plan for plan in plans if plan.generation in kept]
