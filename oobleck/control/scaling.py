"""How many of the nodes at hand a job should use: a policy, and what keeps it from changing its mind too often.

Pure: `decide` is asked whenever something changes, and carries its wish from one call to the next. Step times by node
count come from the planner; the cost of a change is what the last ones were measured to cost.

A wish becomes a change only when it has lasted for a minute, and when what it gains until the horizon is more than
what the change costs. Both are compared in useful node-seconds' worth of time: see `_repays`. Nodes that are gone
are no wish: whoever has lost them plans anew without asking.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ScalingDecision", "ScalingPolicy", "ScalingState", "Wish", "decide", "efficient_count"]

HYSTERESIS_S = 60.0
"""A wish must last so long."""
LEAST_MARGINAL_SHARE = 0.2
"""A node more must bring at least this share of what nodes bring on average."""


class ScalingPolicy(StrEnum):
    ALL = "all"
    """The node count with the least step time."""
    EFFICIENT = "efficient"
    """As many nodes as still bring something for what they cost."""
    DEADLINE = "deadline"
    """The fewest nodes that are done in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """What is known when the question is asked; times in seconds on one clock."""

    now_s: float
    num_nodes: int
    """In use."""
    step_s: Mapping[int, float]
    """Predicted step time of the best plan for each node count that can be had and planned for."""
    steps_left: int
    horizon_s: float
    """How long things are expected to stay as they are: the mean time between changes of the cluster."""
    change_cost_s: float
    """Time without progress that a change costs, as measured."""
    deadline_s: float | None = None
    """When the job must be done; for `DEADLINE`."""

    def __post_init__(self) -> None:
        assert self.step_s, "no node count can be planned for"
        assert all(count >= 1 and seconds > 0 for count, seconds in self.step_s.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A node count that is wanted."""

    target: int
    since_s: float
    """Since when more nodes, or fewer, are wanted than are in use; how many may vary meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    target: int
    """Nodes to use from now on; those in use where nothing is to change."""
    reason: str
    wish: Wish | None = None
    """To be handed to the next call."""


def decide(state: ScalingState, policy: ScalingPolicy, wish: Wish | None = None) -> ScalingDecision:
    """Decide how many nodes to use; O(node counts · log). `wish` is that of the decision before."""
    wanted, why = _wanted(state, policy)
    current = state.num_nodes
    if wanted == current:
        return ScalingDecision(target=current, reason=f"{current} nodes are as wanted: {why}")
    lasts = wish is not None and (wish.target > current) == (wanted > current)
    since_s = wish.since_s if wish is not None and lasts else state.now_s
    kept = Wish(target=wanted, since_s=since_s)
    if current not in state.step_s:
        return ScalingDecision(target=wanted, reason=f"{current} nodes cannot go on; {wanted}: {why}")
    waited_s = state.now_s - since_s
    if waited_s < HYSTERESIS_S:
        reason = f"{wanted} nodes are wanted ({why}) for {waited_s:.0f} s of {HYSTERESIS_S:.0f}"
        return ScalingDecision(target=current, reason=reason, wish=kept)
    if not _repays(state, policy, wanted):
        reason = f"{wanted} nodes are wanted ({why}), which does not repay the change"
        return ScalingDecision(target=current, reason=reason, wish=kept)
    return ScalingDecision(target=wanted, reason=f"{current} to {wanted} nodes: {why}")


def efficient_count(step_s: Mapping[int, float]) -> int:
    """The largest node count on the concave hull of throughput whose nodes bring enough; O(n log n).

    On the hull, the gain of a node falls with the count, so the first step that brings less than 0.2 of the mean ends
    the search; counts below the hull (plans that do not divide well) are passed over.
    """
    hull = _hull([(count, 1.0 / seconds) for count, seconds in sorted(step_s.items())])
    chosen, rate = hull[0]
    for count, better in hull[1:]:
        if (better - rate) / (count - chosen) < LEAST_MARGINAL_SHARE * rate / chosen:
            break
        chosen, rate = count, better
    return chosen


def _wanted(state: ScalingState, policy: ScalingPolicy) -> tuple[int, str]:
    fastest = min(state.step_s, key=lambda count: (state.step_s[count], count))
    match policy:
        case ScalingPolicy.ALL:
            return fastest, f"a step takes {state.step_s[fastest]:.3g} s"
        case ScalingPolicy.EFFICIENT:
            return efficient_count(state.step_s), "more nodes would bring little"
        case ScalingPolicy.DEADLINE:
            in_time = [count for count in sorted(state.step_s) if _end_s(state, count) <= _deadline_s(state)]
            if in_time:
                return in_time[0], "the fewest that are done in time"
            return fastest, "no number of nodes is done in time"


def _deadline_s(state: ScalingState) -> float:
    return math.inf if state.deadline_s is None else state.deadline_s


def _end_s(state: ScalingState, count: int) -> float:
    """When the job would be done with so many nodes."""
    change_s = 0.0 if count == state.num_nodes else state.change_cost_s
    return state.now_s + change_s + state.steps_left * state.step_s[count]


def _repays(state: ScalingState, policy: ScalingPolicy, wanted: int) -> bool:
    """Whether a change gains more by the horizon, or the job's end, than it costs.

    More speed gains time: the steps of the period would take less of it. Fewer nodes gain node-seconds, and the change
    costs those of the nodes that wait for it. A deadline that would be missed is worth any change that helps.
    """
    now, then = state.step_s[state.num_nodes], state.step_s[wanted]
    if policy is ScalingPolicy.DEADLINE and _end_s(state, state.num_nodes) > _deadline_s(state):
        return _end_s(state, wanted) < _end_s(state, state.num_nodes)
    steps = min(float(state.steps_left), state.horizon_s / now)
    if policy is ScalingPolicy.ALL or (policy is ScalingPolicy.EFFICIENT and wanted > state.num_nodes):
        return steps * (now - then) > state.change_cost_s
    return steps * (now * state.num_nodes - then * wanted) > state.change_cost_s * wanted


def _hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The upper concave hull of points in order (Andrew's monotone chain)."""
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return hull


def _slope(first: tuple[int, float], second: tuple[int, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])
