"""Whose gradients are summed with whose, without parameters: the twin of `training.step.reduction`'s buckets."""

from __future__ import annotations

from oobleck.control.commit import Committee, GroupKey
from oobleck.planner import WorkerId

__all__ = ["Bucket", "buckets_of"]

Bucket = tuple[GroupKey, tuple[int, ...]]
"""A group, and the layers whose gradients it sums."""


def buckets_of(committee: Committee, worker_id: WorkerId) -> tuple[Bucket, ...]:
    """The layers of one worker by their owners in a committee, in an order that all owners share."""
    located = committee.plan.locate(worker_id)
    assert located is not None
    pipeline, stage = located
    by_owners: dict[tuple[WorkerId, ...], list[int]] = {}
    for layer in committee.plan.pipelines[pipeline].stages[stage].layers:
        living = tuple(
            worker_id for worker_id in committee.plan.owners_of(layer) if worker_id.node not in committee.lost
        )
        by_owners.setdefault(living, []).append(layer)
    return tuple((committee.key_of(members), tuple(layers)) for members, layers in sorted(by_owners.items()))
