"""On how many nodes the run trains, and which rest: the policy's decision from measured times, held steady.

    as wanted ── the policy wants more, or fewer ──> waiting ── it still does after `hysteresis_s` ──> another target
        ^                                               │ it wants the present number, or the other direction
        └───────────────────────────────────────────────┘

Nodes that rest stay connected, and hold no layers. They are the first to replace a lost node, without a wait, because
the target does not change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from oobleck.control.events import Turn
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
"""The least and the greatest interval between reviews; between them it is the policy's `hysteresis_s`."""
_UNMEASURED_CHANGE_S = 5.0
"""The assumed cost of a change before any was measured."""
_CHANGES_KEPT = 8
_STEPS_KEPT = 20
_STEPS_NEEDED = 5
"""How many steps have to be timed before their time counts."""


class Scaling:
    """The target, since when the policy has wanted another one, and the measured times of steps and changes."""

    def __init__(self, job: JobSpec, members: Membership, progress: Progress) -> None:
        self._job = job
        self._spec = job.scaling
        self._members = members
        self._progress = progress
        self._target: int | None = None
        """None for all nodes."""
        self._since: tuple[bool, float] | None = None
        """Whether the policy wants more nodes or fewer, and since when."""
        self._timed: dict[int, deque[float]] = {}
        """The seconds of the latest steps, by their number of nodes."""
        self._plan: tuple[int, float] | None = None
        """The newest plan's number of nodes, and the bound on the seconds of its steps."""
        self._ratio = 1.0
        """Measured seconds of a step over their bound, which is what the planner tells of other numbers of nodes."""
        self._planned_s: deque[float] = deque(maxlen=_CHANGES_KEPT)
        self._forced_s: deque[float] = deque(maxlen=_CHANGES_KEPT)
        """The costs of planned and of other changes."""
        self._num_changes = 0
        self._is_late = False
        self.due_s = math.inf

    # --- what happens ------------------------------------------------------------------------------------------

    def begin(self, turn: Turn, planner: Planner, nodes: Sequence[str]) -> None:
        """Settle on how many of these nodes to begin. Raises PlanningError."""
        self.look_later(turn.now_s)
        if self._spec.policy != "all":
            self._set(turn, first_target(self._job, planner, nodes), len(nodes))

    def resting(self, planner: Planner, nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(planner.best_first(nodes)[self._limit(planner, nodes) :])

    def restore(self, target: int | None, num_changes: int, now_s: float) -> None:
        self._target, self._num_changes = target, num_changes
        self.look_later(now_s)

    def plan_adopted(self, decision: Decision) -> None:
        # The plan's steps are timed apart from those of earlier plans on as many nodes.
        self._plan = (len(decision.plan.nodes), decision.bound_step_s)
        self._timed.pop(self._plan[0], None)

    def step_done(self, record: CommitRecord, *, generation: int) -> None:
        """Time a step, if it was committed under the newest plan, which is that of `generation`."""
        if self._plan is None or record.generation != generation or self._spec.policy == "all":
            return
        num_nodes, bound_s = self._plan
        timed = self._timed.setdefault(num_nodes, deque(maxlen=_STEPS_KEPT))
        timed.append(record.duration_s)
        if len(timed) >= _STEPS_NEEDED and bound_s > 0:
            self._ratio = median(timed) / bound_s

    def recovery_done(self, done: RecoveryDone) -> None:
        self._num_changes += 1
        (self._planned_s if done.cause.is_planned else self._forced_s).append(done.stall_s)

    def paces_changed(self, now_s: float) -> None:
        """Discard the times of steps: nodes have become slower or faster."""
        self._timed.clear()
        self.look_soon(now_s)

    def look_soon(self, now_s: float) -> None:
        """Review at once: something has changed that the decision may depend on."""
        if self._spec.policy != "all":
            self.due_s = now_s

    def look_later(self, now_s: float) -> None:
        if self._spec.policy != "all":
            often_s, seldom_s = _LOOKS_EVERY_S
            self.due_s = now_s + max(often_s, min(seldom_s, self._spec.hysteresis_s))

    # --- decisions ---------------------------------------------------------------------------------------------

    def consider(self, turn: Turn, planner: Planner) -> bool:
        """Decide again; returns whether to change the number of nodes now."""
        now_s, available = turn.now_s, self._available
        self.look_later(now_s)
        if len(available) < len(self._members.ready):
            return False  # Nodes are leaving, and the next plan shows whether the others are enough.
        wanted = scaling_target(self._state(planner, available, now_s))
        if wanted.is_late and not self._is_late:
            turn.note("warning", f"the deadline cannot be met on any number of these nodes: {wanted.reason}")
        self._is_late = wanted.is_late
        used = self._limit(planner, available)
        if wanted.num_nodes == used:
            self._since = None
            return False
        grows = wanted.num_nodes > used
        if self._since is None or self._since[0] is not grows:
            self._since = (grows, now_s)
        # A change needs a decision that has kept its direction for a while.
        settled_s = self._since[1] + self._spec.hysteresis_s
        if now_s < settled_s:
            self.due_s = min(self.due_s, settled_s)
            return False
        self._set(turn, wanted, len(available))
        return True

    def wants_more(self, planner: Planner, num_used: int) -> bool:
        """Whether a new node should train at once, in addition to the `num_used` that do."""
        return self._target is None or num_used < self._limit(planner, self._available)

    def choices(
        self, planner: Planner, plan: ExecutionPlan, *, lost: Collection[str], slow: Collection[str]
    ) -> list[tuple[str, ...]]:
        """Return the sets of nodes that may rest, of which the planner takes the best."""
        nodes = self._available
        number = len(nodes) - self._limit(planner, nodes)
        if number <= 0:
            return [()]
        used = [node for node in plan.nodes if node in nodes and node not in lost]
        others = [node for node in nodes if node not in used]

        def resting(ordered: Sequence[str]) -> tuple[str, ...]:
            # Nodes that train come first, so they continue as far as they are wanted. Slow nodes come last and rest
            # first; of several kinds it is the slowest.
            return tuple(sorted(planner.best_first([*ordered, *others]), key=lambda node: node in slow)[-number:])

        together, spread = resting(used), resting(_by_position(plan, used))
        return [together] if set(together) == set(spread) else [together, spread]

    def horizon_s(self, now_s: float) -> float:
        """Return the mean time between changes, as if the job's expected interval and one change had come first."""
        return (self._job.change_interval_s + now_s) / (1 + self._num_changes)

    # --- the state of things -----------------------------------------------------------------------------------

    @property
    def _available(self) -> list[str]:
        return [member.spec.name for member in self._members.ready if not member.is_draining]

    def _limit(self, planner: Planner, available: Sequence[str]) -> int:
        if self._target is None or self._target >= len(available):
            return len(available)
        # A target from a time when there were too few nodes is not safe any more.
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
            horizon_s=self.horizon_s(now_s),
            change_s=median(changes_s) if changes_s else _UNMEASURED_CHANGE_S,
        )

    def _step_s(self, planner: Planner, nodes: Sequence[str]) -> float:
        """Return the seconds of a step: as measured on this number of nodes, or as predicted and measured on others."""
        timed = self._timed.get(len(nodes), ())
        return median(timed) if len(timed) >= _STEPS_NEEDED else planner.step_s(nodes) * self._ratio

    def _set(self, turn: Turn, target: ScalingTarget, available: int) -> None:
        self._target, self._since = target.num_nodes, None
        entry = ScalingDecided(
            t_s=turn.now_s,
            policy=self._spec.policy,
            num_nodes=target.num_nodes,
            num_available=available,
            reason=target.reason,
        )
        turn.record(entry)


def first_target(job: JobSpec, planner: Planner, nodes: Sequence[str]) -> ScalingTarget:
    """Return how many nodes a new job begins on. Raises PlanningError."""
    if job.scaling.policy == "deadline":  # With all nodes, because no time is measured yet.
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
            horizon_s=job.change_interval_s,
            change_s=0.0,
        )
    )


def _by_position(plan: ExecutionPlan, used: Sequence[str]) -> list[str]:
    """Sort nodes by their position in their pipelines, so that the last ones belong to all pipelines in turn."""
    position: Mapping[str, int] = {
        node: index for pipeline in plan.pipelines for index, node in enumerate(pipeline.nodes)
    }
    return sorted(used, key=lambda node: position[node])
