"""What ends a step: gradients summed over owner sets, and the commit that all take part in or none.

Reductions run out of place, from flat copies, so that an interrupted one leaves every rank's own gradients
whole. The commit is one small all-reduce over all workers; it carries what everyone must agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from oobleck.planner import ExecutionPlan, Place

from .groups import GroupKey, GroupTable
from .models import ModelStructure
from .signals import Signals

__all__ = ["Bucket", "Commit", "commit", "commit_key", "make_buckets", "reduce_gradients", "squared_norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters with one owner set, reduced together."""

    key: GroupKey
    parameters: tuple[str, ...]

    def is_counted_by(self, place: Place) -> bool:
        """Tell whether `place` counts these parameters in the global gradient norm: one owner does."""
        return self.key.members[0] == place


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What all workers learn from the commit's all-reduce; equal everywhere to the last bit."""

    loss: float
    grad_norm: float
    stop: bool
    counts: tuple[int, ...]
    """How often each microbatch of the step was counted; anything but 1 is a bug of ours."""

    @property
    def repeated(self) -> int:
        return sum(max(0, count - 1) for count in self.counts)

    @property
    def missing(self) -> int:
        return sum(count == 0 for count in self.counts)


def make_buckets(
    plan: ExecutionPlan, place: Place, structure: ModelStructure, *, generation: int, lost: Collection[str] = ()
) -> tuple[Bucket, ...]:
    """Group the parameters that `place` holds by their owner sets among the nodes not lost; O(parameters).

    A tied parameter belongs to several layers; its owners are all who hold any of them.
    """
    located = plan.locate(place)
    assert located is not None
    pipeline, stage = located
    owners = {layer: plan.owners_of(layer) for layer in range(plan.num_layers)}
    by_owners: dict[tuple[Place, ...], list[str]] = {}
    names = dict.fromkeys(
        name for layer in plan.pipelines[pipeline].stages[stage].layers for name in structure.layer_parameters(layer)
    )
    for name in names:
        holders = {owner for layer in structure.layers_with(name) for owner in owners[layer]}
        living = tuple(sorted(owner for owner in holders if owner.node not in lost))
        by_owners.setdefault(living, []).append(name)
    return tuple(
        Bucket(key=GroupKey("reduce", generation, members), parameters=tuple(sorted(parameters)))
        for members, parameters in sorted(by_owners.items())
    )


def commit_key(plan: ExecutionPlan, *, generation: int, lost: Collection[str] = ()) -> GroupKey:
    """The group of all workers that take part in the commit."""
    return GroupKey("reduce", generation, tuple(place for place in plan.places if place.node not in lost))


def reduce_gradients(
    buckets: Sequence[Bucket],
    parameters: Mapping[str, torch.nn.Parameter],
    groups: GroupTable,
    signals: Signals,
    interrupted: Callable[[], bool],
) -> dict[str, torch.Tensor]:
    """Sum each parameter's gradient over its owners; a parameter without a gradient counts as zeros.

    Buckets are posted in the same order by all (they are sorted by members), then waited for together.
    Raises Interrupted or PeerLost; the parameters' own gradients are untouched either way.
    """
    flats = [_flatten(bucket, parameters) for bucket in buckets]
    pending = [
        groups[bucket.key].all_reduce(flat, signals)
        for bucket, flat in zip(buckets, flats, strict=True)
        if len(bucket.key.members) > 1
    ]
    for reduction in pending:
        reduction.wait(interrupted)
    reduced: dict[str, torch.Tensor] = {}
    for bucket, flat in zip(buckets, flats, strict=True):
        shapes = [parameters[name].shape for name in bucket.parameters]
        pieces = torch.split(flat, [shape.numel() for shape in shapes])
        reduced.update(
            (name, piece.view(shape)) for name, piece, shape in zip(bucket.parameters, pieces, shapes, strict=True)
        )
    return reduced


def squared_norm(buckets: Sequence[Bucket], reduced: Mapping[str, torch.Tensor], place: Place) -> float:
    """The part of the squared global gradient norm that `place` counts."""
    counted = [reduced[name] for bucket in buckets if bucket.is_counted_by(place) for name in bucket.parameters]
    if not counted:
        return 0.0
    norms = torch.stack(torch._foreach_norm(counted)).double()
    return float((norms * norms).sum())


def commit(
    key: GroupKey,
    *,
    loss: float,
    squared_grad_norm: float,
    stop: bool,
    counts: Mapping[int, int],
    num_microbatches: int,
    groups: GroupTable,
    signals: Signals,
    interrupted: Callable[[], bool],
) -> Commit:
    """Take part in the commit. Whoever returns from it knows that all have reduced all their gradients.

    Raises Interrupted or PeerLost: then nothing is known, and the coordinator decides.
    """
    vector = torch.zeros(3 + num_microbatches, dtype=torch.float64)
    vector[0], vector[1], vector[2] = loss, squared_grad_norm, float(stop)
    for microbatch, count in counts.items():
        vector[3 + microbatch] = count
    if len(key.members) > 1:
        groups[key].all_reduce(vector, signals).wait(interrupted)
    values = vector.tolist()
    return Commit(
        loss=values[0],
        grad_norm=values[1] ** 0.5,
        stop=values[2] > 0,
        counts=tuple(round(value) for value in values[3:]),
    )


def _flatten(bucket: Bucket, parameters: Mapping[str, torch.nn.Parameter]) -> torch.Tensor:
    tensors = [parameters[name] for name in bucket.parameters]
    return torch.cat(
        [(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad).detach().reshape(-1) for tensor in tensors]
    )
