"""Who saves which layer: one of those who hold it, so that each saves about as much. A pure function of the plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from oobleck.planner import ExecutionPlan, WorkerId


def saving_shares(
    plan: ExecutionPlan, sizes: Sequence[int], *, lost: Collection[str] = (), rank: int = 0, degree: int = 1
) -> dict[WorkerId, tuple[int, ...]]:
    """Deal the layers among their holders on nodes that are not lost; O(layers · holders).

    The largest layers are assigned first, each to the holder that has the least to save so far (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969: at most 4/3 of the optimum where each worker holds everything). Layers that
    no worker holds any more are in no share.

    Where `degree` devices share each stage, those of one `rank` share out their parts of the layers; the others do
    alike, so that all parts of a layer are saved on one node.
    """
    load: dict[WorkerId, int] = {}
    dealt: dict[WorkerId, list[int]] = {}
    for layer in sorted(range(plan.num_layers), key=lambda layer: (-sizes[layer], layer)):
        owners = plan.owners_of(layer)
        holders = [
            worker_id for worker_id in owners if worker_id.node not in lost and worker_id.device % degree == rank
        ]
        if holders:
            saver = min(holders, key=lambda worker_id: (load.get(worker_id, 0), worker_id))
            load[saver] = load.get(saver, 0) + sizes[layer]
            dealt.setdefault(saver, []).append(layer)
    return {worker_id: tuple(sorted(layers)) for worker_id, layers in sorted(dealt.items())}
