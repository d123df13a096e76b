"""Who saves which layer: one of those who hold it, so that each saves about as much. A pure function of the plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from oobleck.planner import ExecutionPlan, Place

__all__ = ["shares_of"]


def shares_of(
    plan: ExecutionPlan, sizes: Sequence[int], *, lost: Collection[str] = (), rank: int = 0, degree: int = 1
) -> dict[Place, tuple[int, ...]]:
    """Deal the layers among their holders on nodes that are not lost; O(layers · holders).

    The largest layers are dealt first, each to the holder that has the least to save so far (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969: at most 4/3 of the optimum where everybody holds everything). Layers that
    nobody holds any more are in no share.

    Where `degree` devices share each stage, those of one `rank` deal their parts of the layers; the others deal theirs
    alike, so that all parts of a layer are saved on one node.
    """
    load: dict[Place, int] = {}
    dealt: dict[Place, list[int]] = {}
    for layer in sorted(range(plan.num_layers), key=lambda layer: (-sizes[layer], layer)):
        owners = plan.owners_of(layer)
        holders = [place for place in owners if place.node not in lost and place.device % degree == rank]
        if holders:
            saver = min(holders, key=lambda place: (load.get(place, 0), place))
            load[saver] = load.get(saver, 0) + sizes[layer]
            dealt.setdefault(saver, []).append(layer)
    return {place: tuple(sorted(layers)) for place, layers in sorted(dealt.items())}
