"""On how many nodes the run trains, and which rest: the policy's decision, held steady, with what is measured.

    as wanted ── the policy wants more, or fewer ──> waiting ── for `hysteresis_s` it did ──> another target
        ^                                               │ it wants what there is, or the other direction
        └───────────────────────────────────────────────┘

Nodes that rest stay connected, and hold no layers. They are the first to take the place of one that is lost, and that
waits for nothing: the target has not changed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from oobleck.control.events import Record, notice
from oobleck.control.journal import RecoveryDone, ScalingDecided
from oobleck.control.nodes import Membership
from oobleck.control.protocol import CommitRecord
from oobleck.control.steps import Progress
from oobleck.job import JobSpec
from oobleck.planner import Decision, ExecutionPlan

from .policy import ScalingState, ScalingTarget, scaling_target

if TYPE_CHECKING:
    from oobleck.planner import Planner

_LOOKS_EVERY_S = (1.0, 60.0)
"""At most and at least so often; between them, as often as a change takes to settle."""
_UNMEASURED_CHANGE_S = 5.0
"""What a change is taken to cost before any was measured."""
_CHANGES_KEPT = 8
_PRIOR_HORIZON_S = 3600.0
"""Until a run has changes of its own to count, one is taken to come in this time."""
_STEPS_KEPT = 20
_STEPS_NEEDED = 5
"""So many steps have to be timed before their time counts."""


class Scaling:
    """The target, what the policy has wanted since when, and what steps and changes were measured to take."""

    def __init__(self, job: JobSpec, members: Membership, progress: Progress) -> None:
        self._job = job
        self._spec = job.scaling
        self._members = members
        self._progress = progress
        self._target: int | None = None
        """None: all."""
        self._since: tuple[bool, float] | None = None
        """Whether more is wanted, or less, and since when."""
        self._timed: dict[int, deque[float]] = {}
        """Seconds of the latest steps, by the number of nodes that took them."""
        self._plan: tuple[int, float] | None = None
        """The newest plan's nodes, and the seconds of a step that were predicted for it."""
        self._ratio = 1.0
        """Measured over predicted seconds of a step."""
        self._planned_s: deque[float] = deque(maxlen=_CHANGES_KEPT)
        self._forced_s: deque[float] = deque(maxlen=_CHANGES_KEPT)
        """What changes cost, those that were planned and those that were not."""
        self._num_changes = 0
        self._is_late = False
        self.due_s = math.inf

    # --- what happens ------------------------------------------------------------------------------------------

    def begin(self, planner: Planner, nodes: Sequence[str], now_s: float) -> tuple[Record, ...]:
        """Training begins: settle on how many of these nodes. Raises PlanningError.

        Nothing is measured yet, so that a deadline is begun with all nodes.
        """
        self.look_later(now_s)
        if self._spec.policy == "all":
            return ()
        return (self._set(first_target(self._job, planner, nodes), len(nodes), now_s),)

    def resting(self, planner: Planner, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes without a part in the first plan."""
        return tuple(planner.best_first(nodes)[self._limit(planner, nodes) :])

    def restore(self, target: int | None, now_s: float) -> None:
        """Go on with the target that the journal of a master before knows."""
        self._target = target
        self.look_later(now_s)

    def plan_adopted(self, decision: Decision) -> None:
        """A plan was ordered; what steps take under it is kept apart from what they took before."""
        self._plan = (len(decision.plan.nodes), decision.predicted_step_s)
        self._timed.pop(self._plan[0], None)

    def step_done(self, record: CommitRecord, *, generation: int) -> None:
        """A step was committed; it counts if it was under the newest plan, of that generation."""
        if self._plan is None or record.generation != generation or self._spec.policy == "all":
            return
        num_nodes, predicted_s = self._plan
        timed = self._timed.setdefault(num_nodes, deque(maxlen=_STEPS_KEPT))
        timed.append(record.duration_s)
        if len(timed) >= _STEPS_NEEDED and predicted_s > 0:
            self._ratio = median(timed) / predicted_s

    def recovery_done(self, done: RecoveryDone) -> None:
        """A change is over: note what it cost."""
        self._num_changes += 1
        (self._planned_s if done.cause.is_planned else self._forced_s).append(done.stall_s)

    def paces_changed(self, now_s: float) -> None:
        """Nodes have become slower or faster: steps that were timed before tell nothing more."""
        self._timed.clear()
        self.look_soon(now_s)

    def look_soon(self, now_s: float) -> None:
        """Something has changed that the decision may depend on."""
        if self._spec.policy != "all":
            self.due_s = now_s

    def look_later(self, now_s: float) -> None:
        """Nothing can be decided now, or everything is."""
        if self._spec.policy != "all":
            often_s, seldom_s = _LOOKS_EVERY_S
            self.due_s = now_s + max(often_s, min(seldom_s, self._spec.hysteresis_s))

    # --- decisions ---------------------------------------------------------------------------------------------

    def consider(self, planner: Planner, now_s: float) -> tuple[bool, tuple[Record, ...]]:
        """Decide again; returns whether the number of nodes that train is to change now, and what is recorded.

        That takes a decision which has not changed its direction for `hysteresis_s`. While nodes leave, nothing is
        decided: those who stay may be too few, which the next plan shows.
        """
        self.look_later(now_s)
        available = self._available
        if len(available) < len(self._members.ready):
            return False, ()
        wanted = scaling_target(self._state(planner, available, now_s))
        warnings = self._warn_if_late(wanted, now_s)
        used = self._limit(planner, available)
        if wanted.num_nodes == used:
            self._since = None
            return False, warnings
        grows = wanted.num_nodes > used
        if self._since is None or self._since[0] is not grows:
            self._since = (grows, now_s)
        settled_s = self._since[1] + self._spec.hysteresis_s
        if now_s < settled_s:
            self.due_s = min(self.due_s, settled_s)
            return False, warnings
        return True, (*warnings, self._set(wanted, len(available), now_s))

    def wants_more(self, planner: Planner, num_used: int) -> bool:
        """Return whether a node that has come is to train at once, beside `num_used` that do."""
        return self._target is None or num_used < self._limit(planner, self._available)

    def choices(
        self, planner: Planner, plan: ExecutionPlan, *, lost: Collection[str], slow: Collection[str]
    ) -> list[tuple[str, ...]]:
        """Return the sets of nodes that may rest; the planner says which of them is best.

        Those who train continue, as far as they are wanted; slow ones rest first, and of several kinds the slowest.
        """
        nodes = self._available
        number = len(nodes) - self._limit(planner, nodes)
        if number <= 0:
            return [()]
        used = [node for node in plan.nodes if node in nodes and node not in lost]
        others = [node for node in nodes if node not in used]

        def resting(ordered: Sequence[str]) -> tuple[str, ...]:
            """The last ones, when slow nodes come after all others."""
            return tuple(sorted(planner.best_first([*ordered, *others]), key=lambda node: node in slow)[-number:])

        together, spread = resting(used), resting(_by_position(plan, used))
        return [together] if set(together) == set(spread) else [together, spread]

    # --- the state of things -----------------------------------------------------------------------------------

    @property
    def _available(self) -> list[str]:
        return [member.spec.name for member in self._members.ready if not member.is_draining]

    def _limit(self, planner: Planner, available: Sequence[str]) -> int:
        """On how many of the available nodes to train: a target from when there were too few is not safe any more."""
        if self._target is None or self._target >= len(available):
            return len(available)
        return max(self._target, planner.fewest_nodes(planner.best_first(available)))

    def _state(self, planner: Planner, available: Sequence[str], now_s: float) -> ScalingState:
        changes_s, nodes = self._planned_s or self._forced_s, planner.best_first(available)
        return ScalingState(
            spec=self._spec,
            num_available=len(nodes),
            num_used=self._limit(planner, nodes),
            fewest=planner.fewest_nodes(nodes),
            step_s=lambda count: self._step_s(planner, nodes[:count]),
            steps_left=self._job.max_steps - self._progress.last_step,
            elapsed_s=now_s,
            horizon_s=(_PRIOR_HORIZON_S + now_s) / (1 + self._num_changes),
            change_s=median(changes_s) if changes_s else _UNMEASURED_CHANGE_S,
        )

    def _step_s(self, planner: Planner, nodes: Sequence[str]) -> float:
        """What a step takes on so many nodes: as measured where it was, else as predicted and measured elsewhere."""
        timed = self._timed.get(len(nodes), ())
        return median(timed) if len(timed) >= _STEPS_NEEDED else planner.step_s(nodes) * self._ratio

    def _set(self, target: ScalingTarget, available: int, now_s: float) -> Record:
        self._target, self._since = target.num_nodes, None
        entry = ScalingDecided(
            t_s=now_s,
            policy=self._spec.policy,
            num_nodes=target.num_nodes,
            num_available=available,
            reason=target.reason,
        )
        return Record(entry=entry)

    def _warn_if_late(self, wanted: ScalingTarget, now_s: float) -> tuple[Record, ...]:
        was_late, self._is_late = self._is_late, wanted.is_late
        if not wanted.is_late or was_late:
            return ()
        text = f"the deadline cannot be met on any number of these nodes: {wanted.reason}"
        return (notice(now_s, "warning", text),)


def first_target(job: JobSpec, planner: Planner, nodes: Sequence[str]) -> ScalingTarget:
    """Return on how many nodes a job begins that nothing has been measured of. Raises PlanningError.

    A deadline is begun with all nodes.
    """
    if job.scaling.policy == "deadline":
        return ScalingTarget(num_nodes=len(nodes), reason="no step has been timed yet")
    ordered = planner.best_first(nodes)
    return scaling_target(
        ScalingState(
            spec=job.scaling,
            num_available=len(ordered),
            num_used=len(ordered),
            fewest=planner.fewest_nodes(ordered),
            step_s=lambda count: planner.step_s(ordered[:count]),
            steps_left=job.max_steps,
            elapsed_s=0.0,
            horizon_s=_PRIOR_HORIZON_S,
            change_s=0.0,
        )
    )


def with_resting(decision: Decision, resting: Sequence[str]) -> Decision:
    """Return a first plan with the nodes that have no part in it, as spares."""
    if not resting:
        return decision
    return replace(decision, plan=replace(decision.plan, spares=(*decision.plan.spares, *resting)))


def _by_position(plan: ExecutionPlan, used: Sequence[str]) -> list[str]:
    """Nodes by their position in their pipelines, so that the last ones are of all pipelines in turn."""
    position: Mapping[str, int] = {
        node: index for pipeline in plan.pipelines for index, node in enumerate(pipeline.nodes)
    }
    return sorted(used, key=lambda node: position[node])
