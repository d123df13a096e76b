"""How many nodes a run should train on: a pure decision that gives its reason.

    all         every node there is
    efficient   as many as are worth their cost: a further node has to add at least `WORTHWHILE` of what a node
                contributes on average
    deadline    the fewest that end the run in time; if none do, as many as are fastest

Never fewer than hold the model f + 1 times. A change has to gain more, while it is likely to last, than changes have
cost so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import assert_never

from oobleck.job import ScalingSpec

WORTHWHILE = 0.2
# A deadline has this margin, which leaves time for failures.
_SLACK = 1.1
# Above this number, counts are considered in steps of 1/64: a node more or less makes no difference there.
_EVERY_COUNT_UP_TO = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """The inputs of the decision."""

    spec: ScalingSpec
    num_available: int
    """Nodes that train, or are ready to."""
    num_used: int
    """Nodes that train, or would if they were all ready."""
    fewest: int
    """Nodes that hold the model f + 1 times; all of them if they do not."""
    step_s: Callable[[int], float]
    """Returns the expected seconds of a step on a number of nodes."""
    steps_left: int
    elapsed_s: float
    horizon_s: float
    """How long the set of nodes is likely to stay as it is."""
    change_s: float
    """The seconds without training that a change costs."""

    def left_s(self, num_nodes: int) -> float:
        return self.steps_left * self.step_s(num_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTarget:
    """The number of nodes to train on, and the reason, as a clause."""

    num_nodes: int
    reason: str
    is_late: bool = False
    """The deadline is missed on any number of nodes."""


def scaling_target(state: ScalingState) -> ScalingTarget:
    """Return how many of the available nodes should train; O(nodes) expectations up to 64 nodes, then O(log nodes)."""
    if state.spec.policy == "all" or state.num_available <= state.fewest:
        few = state.spec.policy != "all"
        reason = f"no fewer than {state.fewest} hold the model safely" if few else "all nodes are used"
        return ScalingTarget(num_nodes=state.num_available, reason=reason)
    match state.spec.policy:
        case "efficient":
            wanted = _most_for_its_cost(state)
        case "deadline":
            wanted = _fewest_in_time(state)
        case _:
            assert_never(state.spec.policy)
    if wanted.num_nodes == state.num_used or _pays(state, wanted.num_nodes):
        return wanted
    reason = f"{wanted.num_nodes} would not repay the {state.change_s:.1f} s that a change costs"
    return ScalingTarget(num_nodes=state.num_used, reason=reason, is_late=wanted.is_late)


def _counts(state: ScalingState) -> Iterator[int]:
    """Yield the numbers of nodes to consider, increasing, with the fewest, those in use and all of them."""
    special = {state.num_used, state.num_available}
    number = state.fewest
    while number <= state.num_available:
        yield number
        following = number + max(1, number // _EVERY_COUNT_UP_TO)
        number = min([following, *(count for count in special if count > number)])


def _most_for_its_cost(state: ScalingState) -> ScalingTarget:
    best, refused = state.fewest, ""
    for count in _counts(state):
        if count == best:
            continue
        share = (1 / state.step_s(count) * state.step_s(best) - 1) * best / (count - best)
        if share >= WORTHWHILE:
            best, refused = count, ""
        elif not refused:
            refused = f"; with {count}, each one more would add {share:.0%} of that"
    return ScalingTarget(
        num_nodes=best, reason=f"each gives {1 / state.step_s(best) / best:.3g} steps/s on average{refused}"
    )


def _fewest_in_time(state: ScalingState) -> ScalingTarget:
    assert state.spec.deadline_s is not None
    left_s = state.spec.deadline_s - state.elapsed_s
    counts = list(_counts(state))
    for count in counts:
        change_s = 0.0 if count == state.num_used else state.change_s
        expected_s = state.left_s(count) * _SLACK + change_s
        if expected_s <= left_s:
            return ScalingTarget(
                num_nodes=count, reason=f"{state.steps_left} steps take {expected_s:.0f} of the {left_s:.0f} s left"
            )
    fastest = min(counts, key=lambda count: (state.step_s(count), count))
    return ScalingTarget(
        num_nodes=fastest,
        reason=f"{state.steps_left} steps take {state.left_s(fastest) * _SLACK:.0f} s, and {left_s:.0f} s are left",
        is_late=True,
    )


def _pays(state: ScalingState, num_nodes: int) -> bool:
    """Whether a change gains more than it costs: in training time if it adds nodes, else in node time."""
    if num_nodes > state.num_used:
        now_s, then_s = state.step_s(state.num_used), state.step_s(num_nodes)
        lasts_s = state.left_s(state.num_used)
        if state.spec.policy != "deadline":  # A run that is late stays late to its end.
            lasts_s = min(lasts_s, state.horizon_s)
        return lasts_s * (1 - then_s / now_s) > state.change_s
    lasts_s = min(state.horizon_s, state.left_s(num_nodes))
    return (state.num_used - num_nodes) * lasts_s > state.num_used * state.change_s
