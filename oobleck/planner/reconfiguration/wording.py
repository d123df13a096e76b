"""The reason for the next plan, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from oobleck.plan import ExecutionPlan, LayerTransfer
from oobleck.planner.formatting import counted, listed, named

from .living_nodes import Changes, LivingNodes

UNCHANGED = "the pipelines stay as they are"


def describe(
    living: LivingNodes, changes: Changes, detail: str, plan: ExecutionPlan, transfers: Sequence[LayerTransfer]
) -> str:
    """Describe in a sentence what happened, and the move to the new plan; `detail` is the move's."""
    slow = sorted(living.slow)
    lost, joined = set(changes.lost), set(changes.joined)
    back = lost & joined
    rested = {node for node in living.resting if node in living.plan.nodes}
    events = (
        (lost - back, "lost"),
        (joined - back, "joined"),
        (back, "started again"),
        (set(changes.leaving), "leaving"),
        (rested, "set aside"),
        (set(slow), "slow"),
    )
    happened = [f"{named(nodes)} {verb}" for nodes, verb in events if nodes]
    parts = [", ".join(happened), detail]
    if number := _fewer_microbatches(living.plan, plan):
        parts.append(f"{counted(number, 'pipeline')} {'takes' if number == 1 else 'take'} fewer microbatches")
    if left_out := [node for node in slow if node in plan.spares]:
        parts.append(f"{named(left_out)} left out")
    if number := len({transfer.layer for transfer in transfers}):
        parts.append(f"{counted(number, 'layer')} to copy")
    return "; ".join(part for part in parts if part)


def detail_of(detail: str, cut_again: Sequence[int], placed_again: Sequence[int]) -> str:
    """Return a move's detail, extended by the pipelines that are cut again, and those whose nodes change places."""
    parts = [] if detail == UNCHANGED and (cut_again or placed_again) else [detail]
    if placed_again:
        parts.append(f"the nodes of {pipelines_named(placed_again)} change places")
    if cut_again:
        parts.append(f"the stages of {pipelines_named(cut_again)} are cut again")
    return "; ".join(parts)


def lack_of_domains(fault_threshold: int) -> str:
    return (
        f"copies of some layers lie in fewer than {fault_threshold + 1} failure domains, which f = {fault_threshold} "
        "asks for"
    )


def pipelines_named(indices: Sequence[int]) -> str:
    """Return "pipeline 3" or "pipelines 0 and 2"."""
    return f"pipeline{'s' if len(indices) != 1 else ''} {listed(map(str, indices))}"


def _fewer_microbatches(before: ExecutionPlan, after: ExecutionPlan) -> int:
    """Return how many pipelines take fewer microbatches than before; 0 where their nodes changed."""
    if [pipeline.nodes for pipeline in before.pipelines] != [pipeline.nodes for pipeline in after.pipelines]:
        return 0
    return sum(
        now.num_microbatches < then.num_microbatches
        for then, now in zip(before.pipelines, after.pipelines, strict=True)
    )
