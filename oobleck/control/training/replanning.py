"""What follows a loss: a plan for the remaining nodes, and whether the step in flight is finished first.

This knows the planner and how fast the nodes are, decides, and orders nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from oobleck.control.data import Sharding
from oobleck.control.events import Turn
from oobleck.control.journal import PaceChanged, PlanCause, ProfileKnown, ShardingChosen
from oobleck.control.nodes import Membership
from oobleck.control.plans import shares_of
from oobleck.control.protocol import Pace, Status
from oobleck.control.recovery import BeginRecovery
from oobleck.control.scaling import Scaling
from oobleck.control.speed import SlowNodeRetry, SpeedTracker, corrected, found_out_s
from oobleck.control.steps import NO_SECTION, PlanHistory, Progress, Verdict, broken_pipelines
from oobleck.errors import PlanningError
from oobleck.job import JobSpec
from oobleck.job import Sharding as StateSharding  # the other one is of data
from oobleck.plan import ScheduleKind
from oobleck.planner import Decision, ExecutionPlan, NodeKind, Profile, WorkerId, profile_to_json

from .consent import Consent
from .planning import choose_sharding
from .replayed_run import ReplayedRun

if TYPE_CHECKING:
    from oobleck.planner import Planner

# A step is run again only if that saves more than this, because finished work is certain and predictions are not.
_WORTH_FORGETTING_S = 1.0
# A master that takes over looks for its nodes this long before it plans, since loading a planner takes time.
_FINDING_S = 2.0
# Plans give a node this share of what they gave one that ran out of memory with it.
_LESS_MEMORY = 0.9
# A plan is not changed for a corrected profile unless its step is shorter by this share: what the machine's other load
# adds to some passes differs from hour to hour.
_CLEARLY_SHORTER = 0.05
_MORE_MEMORY = "add nodes, give each more memory, make microbatch_size smaller or set recompute"
_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """The state in which a loss left the workers, by the survivors' answers."""

    verdict: Verdict
    statuses: Mapping[WorkerId, Status]
    base: ExecutionPlan
    lost: frozenset[str]
    """Nodes that have no part in the plan in force any more."""
    is_from_scratch: bool
    """The run began with the model's initial values, and has not gone back to a checkpoint."""
    is_unexplained: bool
    """No answer explains a hang: the groups themselves are not to be trusted."""


@dataclass(slots=True, eq=False)
class Replanning:
    """Knows the profiles and their planner, the nodes' paces, and the copies of layers that are not to be trusted."""

    _job: JobSpec
    _members: Membership
    _progress: Progress
    _scaling: Scaling
    _sharding: Sharding
    _consent: Consent
    _schedules_for: Callable[..., tuple[ScheduleKind, ...]]
    """Takes a profile and a plan, and `profile_of`: `schedules_for` of the job."""
    _make_planner: Callable[..., Planner]
    """`planner_for` of the job. May raise PlanningError. The first plan calls it, because it takes a while."""
    kinds: tuple[NodeKind, ...] = ()
    sharding: StateSharding | None = None
    """What devices share out, chosen with the first plan; None where the job says it."""
    _planner: Planner | None = None
    _paces: SpeedTracker = field(default_factory=SpeedTracker)
    _slow_retry: SlowNodeRetry = field(default_factory=SlowNodeRetry)
    _is_corrected: bool = False
    """What the steps of the newest plan take has been compared with the profiles."""
    _plan: ExecutionPlan | None = None
    _plan_before: ExecutionPlan | None = None
    _from_s: float = 0.0
    _distrusted: dict[WorkerId, frozenset[int]] = field(default_factory=dict)
    """Layers that differ from their other copies, by holder, until they are replaced."""

    def take_over(self, replayed: ReplayedRun, now_s: float) -> None:
        self.kinds, self._from_s = replayed.kinds, now_s + _FINDING_S
        self._plan, self.sharding = replayed.generations.plan, replayed.sharding
        self._paces.restore(replayed.slow)
        self._leave_out(replayed.generations.plan, replayed.predicted_step_s, now_s)
        self._scaling.restore(replayed.target, replayed.num_changes, now_s)

    def begin(self, turn: Turn, kinds: tuple[NodeKind, ...], nodes: Sequence[str]) -> None:
        """Begin to plan with these profiles. Raises PlanningError."""
        self.kinds = kinds
        if len(self._job.shardings) > 1:
            self._choose_sharding(turn, nodes)
        self._scaling.begin(turn, self.planner, nodes)

    def _choose_sharding(self, turn: Turn, nodes: Sequence[str]) -> None:
        self.sharding, seconds = choose_sharding(
            self._job, lambda each: self._make_planner(self.kinds, sharding=each), nodes
        )
        turn.record(ShardingChosen(t_s=turn.now_s, sharding=self.sharding, step_s=seconds))

    def know(self, kinds: tuple[NodeKind, ...]) -> tuple[NodeKind, ...]:
        """Plan for these kinds, too, and return the new ones. Raises PlanningError, and changes nothing then."""
        known, network = {kind.name for kind in self.kinds}, self.kinds[0].profile.network
        # A profile that only assumes its links' speed takes that of the others, which may have been measured.
        new = tuple(
            replace(kind, profile=replace(kind.profile, network=network)) if kind.profile.network.assumed else kind
            for kind in kinds
            if kind.name not in known
        )
        if new:
            self._planner = self._planner_of((*self.kinds, *new))
            self.kinds = (*self.kinds, *new)
        return new

    def first_plan(self, nodes: Sequence[str]) -> Decision:
        """Return the first plan for these nodes. Raises PlanningError."""
        resting = self._scaling.resting(self.planner, nodes)
        decision = self.planner.initial_plan([node for node in nodes if node not in resting])
        return replace(decision, plan=replace(decision.plan, spares=(*decision.plan.spares, *resting)))

    def has_time(self, now_s: float) -> bool:
        """Whether it may plan although nothing is lost."""
        return bool(self.kinds) and now_s >= self._from_s

    def stop(self) -> None:
        """Plan only for losses from now on: any other plan would delay the requested end."""
        self._from_s = math.inf

    @property
    def planner(self) -> Planner:
        """Raises PlanningError if the profiles allow none."""
        if self._planner is None:
            assert self.kinds
            self._planner = self._planner_of(self.kinds)
        return self._planner

    def _planner_of(self, kinds: Sequence[NodeKind]) -> Planner:
        return self._make_planner(kinds, sharding=self.sharding)

    # --- memory --------------------------------------------------------------------------------------------

    def use_less_memory(self, turn: Turn, node: str, plan: ExecutionPlan) -> None:
        """Give nodes less than `plan`, or the one before it, from now on, as this node ran out of memory."""
        # A scheduler says so only once the node is lost, and the others may have a plan without it by then.
        if node not in plan.pipeline_of:
            if self._plan_before is None or node not in self._plan_before.pipeline_of:
                return
            plan = self._plan_before
        if len(self.kinds) != 1:
            turn.note("warning", f"{node} ran out of memory, and plans for several kinds of nodes stay: {_MORE_MEMORY}")
            return
        (kind,) = self.kinds
        device = kind.profile.device
        most = int(_LESS_MEMORY * _device_peak_bytes(self.planner, plan, node))
        if most >= device.memory_bytes:
            return
        less = replace(kind, profile=replace(kind.profile, device=replace(device, memory_bytes=max(1, most))))
        try:
            smaller = self._planner_of((less,))
            # Without the node, which may not come back.
            smaller.initial_plan(sorted(self._members.ready_names - {node}))
        except PlanningError as error:
            problem = f"no plan of the others needs less ({error}): {_MORE_MEMORY}"
            turn.note("warning", f"{node} ran out of memory, and {problem}")
            return
        self.kinds, self._planner = (less,), smaller
        turn.record(profile_known(less, turn.now_s))
        what = f"plans use at most {most / 1e9:.3g} GB of each such device's {device.memory_bytes / 1e9:.3g} GB"
        turn.note("warning", f"{node} ran out of memory: {what} from now on")

    # --- paces ---------------------------------------------------------------------------------------------

    def note_pace(
        self,
        turn: Turn,
        worker_ids: Iterable[WorkerId],
        pace: Pace,
        plan: ExecutionPlan,
        schedules: Sequence[ScheduleKind],
    ) -> BeginRecovery | None:
        """Note how fast workers compute under a plan; plan again if slow nodes, or wrong profiles, make that pay."""
        if not self.has_time(turn.now_s):
            return None
        profile_of, before = self.planner.profile_of, self._paces.slow
        for worker_id in worker_ids:
            self._paces.note(worker_id, pace, plan, profile_of(worker_id.node), schedules)
        if not self._paces.take_change(plan):
            return self._correct(turn, plan, schedules)
        after = self._paces.slow
        changed = sorted(node for node in {*before, *after} if before.get(node) != after.get(node))
        for node in changed:
            turn.record(PaceChanged(t_s=turn.now_s, node=node, factor=after.get(node, 1.0)))
        self._scaling.paces_changed(turn.now_s)
        return self._if_it_pays(changed, PlanCause.SLOW, plan, turn.now_s)

    def _correct(self, turn: Turn, plan: ExecutionPlan, schedules: Sequence[ScheduleKind]) -> BeginRecovery | None:
        """Correct the profiles by what a plan's first reports show; plan again if another plan or schedule pays."""
        if self._is_corrected or (usual := self._paces.usual(plan, schedules)) is None:
            return None
        self._is_corrected = True
        kinds = corrected(self.kinds, usual, self._members.kinds)
        changed = [(new, old) for new, old in zip(kinds, self.kinds, strict=True) if new is not old]
        if not changed:
            return None
        self.kinds, self._planner = kinds, self._planner_of(kinds)
        self._paces.begin_again()
        for new, old in changed:
            turn.record(profile_known(new, turn.now_s))
            times = _whole_s(new.profile) / _whole_s(old.profile)
            name = "" if len(kinds) == 1 else f" on {new.name}"
            text = f"passes take {times:.2f} times as long{name} as when they were measured"
            turn.note("info", f"{text}, and are predicted so from now on")
        first = self.planner.profile_of(plan.nodes[0])
        if self._schedules_for(first, plan, profile_of=self.planner.profile_of) != tuple(schedules):
            return BeginRecovery(cause=PlanCause.MEASURED, nodes=())
        whole = {index: (each.num_microbatches, 0) for index, each in enumerate(plan.pipelines)}
        most_s = self.planner.rest_s(plan, whole) * (1 - _CLEARLY_SHORTER)
        if not self._pays_another(plan, turn.now_s, within_s=most_s):
            return None
        return BeginRecovery(cause=PlanCause.MEASURED, nodes=())

    def forget_pace(self, node: str) -> None:
        self._slow_retry.forget(node)
        self._paces.forget(node)

    def plan_adopted(self, decision: Decision, now_s: float) -> None:
        """Note an ordered plan: slow nodes that it leaves out are tried again later."""
        self._plan, self._plan_before = decision.plan, self._plan
        self._is_corrected = False
        self._scaling.plan_adopted(decision)
        self._leave_out(decision.plan, decision.predicted_step_s, now_s)

    def distrust(self, copies: Mapping[WorkerId, frozenset[int]]) -> None:
        """Have these copies of layers replaced: they differ from the others."""
        self._distrusted.update(copies)

    def trust_all(self) -> None:
        self._distrusted.clear()

    def _leave_out(self, plan: ExecutionPlan, step_s: float, now_s: float) -> None:
        resting = [node for node in plan.spares if node in self._paces.slow]
        found_s = found_out_s(step_s, len(plan.worker_ids))
        self._slow_retry.leave_out(resting, now_s, found_out_s=found_s)

    @property
    def retries_s(self) -> float:
        """When to try a slow node again that was left out; infinity for never."""
        return self._slow_retry.due_s

    def retry_slow(self, plan: ExecutionPlan, now_s: float) -> BeginRecovery | None:
        """Treat slow nodes that have waited long enough as normal; plan again if another plan pays then."""
        nodes = self._slow_retry.take_due(now_s)
        for node in nodes:
            self._paces.forget(node)
        self._scaling.paces_changed(now_s)
        return self._if_it_pays(nodes, PlanCause.RETRIED, plan, now_s)

    def _if_it_pays(
        self, nodes: Sequence[str], cause: PlanCause, plan: ExecutionPlan, now_s: float
    ) -> BeginRecovery | None:
        """Plan again if these nodes have changed their speed and another plan is better now."""
        return BeginRecovery(cause=cause, nodes=tuple(nodes)) if nodes and self._pays_another(plan, now_s) else None

    def _pays_another(self, plan: ExecutionPlan, now_s: float, *, within_s: float = math.inf) -> bool:
        """Return whether another plan, whose step is bounded by `within_s`, would be chosen now without a loss."""
        staying = {member.spec.name for member in self._members.ready if not member.is_draining}
        gone, slow = [node for node in plan.spares if node not in staying], self._paces.slow
        for resting in self._scaling.choices(self.planner, plan, lost=(), slow=slow):
            horizon_s = self._scaling.horizon_s(now_s)
            decision = self.planner.reconfigure(plan, lost=gone, slow=slow, resting=resting, horizon_s=horizon_s)
            if decision.plan.pipelines != plan.pipelines and decision.bound_step_s <= within_s:
                return True
        return False

    def rescale(self, turn: Turn, plan: ExecutionPlan) -> BeginRecovery | None:
        """Review how many nodes should train; plan again if that number has changed."""
        if not self.has_time(turn.now_s):
            self._scaling.look_later(turn.now_s)
            return None
        if not self._scaling.consider(turn, self.planner):
            return None
        (resting, *_) = self._scaling.choices(self.planner, plan, lost=(), slow=self._paces.slow)
        changed = set(plan.nodes).intersection(resting) or {
            member.spec.name
            for member in self._members.ready
            if member.spec.name not in plan.nodes and member.spec.name not in resting
        }
        return BeginRecovery(cause=PlanCause.SCALED, nodes=tuple(sorted(changed)))

    def wants_more(self, num_used: int) -> bool:
        return self._scaling.wants_more(self.planner, num_used)

    # --- plans ---------------------------------------------------------------------------------------------

    def choose(self, after: Aftermath, generations: PlanHistory, now_s: float) -> tuple[Decision, int | None]:
        """Find a plan for the remaining nodes, and the step in flight if it is finished first.

        It is finished whenever possible, unless all survivors would run its uncommitted part again in clearly less time
        than the whole pipelines need to finish it. Raises PlanningError or Unrecoverable.
        """
        verdict, base, lost = after.verdict, after.base, after.lost
        finish = generations.step_to_finish(verdict, after.statuses, lost) if self._may_finish(after) else None
        has_initial = finish is None and _is_untrained(after)
        decision = self.replan(base, self._held(after, finish), lost=frozenset() if has_initial else lost, now_s=now_s)
        if finish is None or not broken_pipelines(base, lost):
            return decision, finish
        assert verdict.adopted is not None
        rests = generations.rests(verdict.adopted, after.statuses, lost)
        finish_s = self.planner.rest_s(base, rests, slow=self._paces.slow)
        partial = generations.partial(verdict).microbatches
        again_s = self._rest_s(decision, partial)
        if finish_s <= again_s + _WORTH_FORGETTING_S:
            return decision, finish
        # If the step is not finished, copies kept from the plan before are not behind, and may be read.
        decision = self.replan(base, self._held(after, None), lost=lost, now_s=now_s)
        what = f"{len(partial)} of {base.num_microbatches} microbatches of step {finish} are committed, the others are"
        again = f"{what if partial else f'step {finish} is'} run again, in {again_s:.1f} s"
        instead = "takes more memory" if math.isinf(finish_s) else f"takes {finish_s:.1f} s"
        return replace(decision, reason=f"{decision.reason}; {again}: finishing it {instead}"), None

    def _may_finish(self, after: Aftermath) -> bool:
        """Whether all can have begun the step in flight, and the groups that began it may end it."""
        verdict = after.verdict
        # An evaluation that is due comes before the step.
        evaluates_first = verdict.section == NO_SECTION and self._progress.owes_evaluation(verdict.applied)
        has_records = self._sharding.can_finish(verdict.applied + 1, verdict.adopted or 0)
        may_begin = self._consent.can_finish(verdict.applied + 1)
        # After a hang that nothing explains, the same groups would hang again.
        return has_records and may_begin and not evaluates_first and not after.is_unexplained

    def _rest_s(self, decision: Decision, partial: Collection[int]) -> float:
        """Bound the seconds of a step under a new plan, after these microbatches are committed, as `rest_s` does."""
        if not partial:
            return decision.bound_step_s
        rests = {index: (0, len(share)) for index, share in enumerate(shares_of(decision.plan, partial))}
        return self.planner.rest_s(decision.plan, rests, slow=self._paces.slow)

    def _held(self, after: Aftermath, finish: int | None) -> dict[WorkerId, frozenset[int]]:
        held = _held(after, finish)
        if not self._distrusted:
            return held
        return held | {
            worker_id: held[worker_id] - layers for worker_id, layers in self._distrusted.items() if worker_id in held
        }

    def replan(
        self,
        base: ExecutionPlan,
        held: Mapping[WorkerId, frozenset[int]],
        *,
        lost: frozenset[str],
        now_s: float,
    ) -> Decision:
        """Find a plan for the remaining nodes. Raises PlanningError or Unrecoverable."""
        known, living = frozenset((*base.nodes, *base.spares)), self._members.ready_names
        gone = (known - living) | (known & lost)  # A lost node that is back has lost its state, and joins.
        draining = frozenset(member.spec.name for member in self._members.ready if member.is_draining)
        arrived = (living - known | living & gone) - draining
        planner, slow = self.planner, self._paces.slow
        decisions = [
            planner.reconfigure(
                base,
                lost=gone,
                joined=arrived.difference(resting),
                leaving=draining - gone,
                resting=resting,
                slow=slow,
                held=held,
                horizon_s=self._scaling.horizon_s(now_s),
            )
            for resting in self._scaling.choices(planner, base, lost=gone, slow=slow)
        ]
        return min(decisions, key=lambda decision: (decision.predicted_step_s, len(decision.transfers)))


def profile_known(kind: NodeKind, now_s: float) -> ProfileKnown:
    """Return the journal's entry for a kind's profile."""
    text = profile_to_json(kind.profile)
    return ProfileKnown(t_s=now_s, profile_json=text, kind=kind.name, num_devices=kind.devices_per_node)


def _whole_s(profile: Profile) -> float:
    return math.fsum(layer.forward_s[1] + layer.backward_s[1] for layer in profile.layers)


def _device_peak_bytes(planner: Planner, plan: ExecutionPlan, node: str) -> float:
    """Return the memory that a plan takes of each of a node's devices, by the planner's estimate."""
    from oobleck.schedule.forecast import forecast

    index = plan.pipeline_of[node]
    own = plan.pipelines[index]
    known = forecast(planner.profile_of(node), plan, kind=None, profile_of=planner.profile_of)
    (found,) = [each for each in known.pipelines if index in each.pipelines]
    peaks = zip(own.template.stages, found.timeline.peak_memory_bytes, strict=False)
    return max(peak / stage.num_devices for stage, peak in peaks if own.nodes[stage.node_index] == node)


def _is_untrained(after: Aftermath) -> bool:
    """Whether nothing is trained yet, so that every worker can make the initial values of any layer."""
    return after.verdict.applied == 0 and after.verdict.section == NO_SECTION and after.is_from_scratch


def _held(after: Aftermath, finish: int | None) -> dict[WorkerId, frozenset[int]]:
    """Return the layers that each survivor can give, at the boundary's version."""
    verdict, base = after.verdict, after.base
    if finish is not None:
        # Layers kept from the plan before are a step behind once this step is finished.
        planned = base.layers_at
        return {
            worker_id: mine if layers == (mine := planned.get(worker_id, _NOTHING)) else layers & mine
            for worker_id, layers in verdict.held.items()
        }
    if _is_untrained(after):
        return {worker_id: frozenset(range(base.num_layers)) for worker_id in after.statuses}
    return dict(verdict.held)
