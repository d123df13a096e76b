"""Sums gradients over owner sets, at the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from oobleck.control.steps import Committee, Interrupted, PeerLost
from oobleck.planner import ExecutionPlan, WorkerId
from oobleck.training.comm import LARGE_SUM, Group, GroupKey, GroupTable, Reduction
from oobleck.training.model import ModelStructure, Share

from .stage_state import StageState

# The neutral element of floating-point addition: -0.0 + -0.0 is -0.0, and -0.0 + x is x, also for 0.0. A gradient that
# no worker has is this number throughout, and the first number of any other gradient never is. So sums tell the two
# apart wherever they go (between workers, into committed sections, to a layer's new holder), and need no flags.
ABSENT = -0.0


def are_absent(sums: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each sum whether no worker has had a gradient of its parameter. Waits for the device once."""
    firsts = torch.stack(_first_of(sums))
    return ((firsts == 0) & torch.signbit(firsts)).tolist()


def _first_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each[(0,) * each.ndim] for each in gradients if each.numel()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters with one owner set, reduced together."""

    key: GroupKey
    parameters: tuple[str, ...]
    is_counted: bool = True
    """Whether the first owner counts it in the global gradient norm; False where another device of the stage does."""


def make_buckets(
    plan: ExecutionPlan,
    worker_id: WorkerId,
    share: Share,
    *,
    key_of: Callable[[tuple[WorkerId, ...]], GroupKey],
    lost: Collection[str] = (),
    max_elements: int = LARGE_SUM,
) -> tuple[Bucket, ...]:
    """Group the parameters that a worker trains by their owner sets among the nodes not lost; O(parameters).

    All owners of a parameter put it into the same bucket, and any two workers have their common buckets in the same
    order. No bucket has more than `max_elements`, unless a single parameter does.
    """
    located = plan.locate(worker_id)
    assert located is not None
    pipeline, stage = located
    structure = share.structure
    owners = {layer: plan.owners_of(layer) for layer in range(plan.num_layers)}
    by_owners: dict[tuple[tuple[WorkerId, ...], bool], list[str]] = {}
    names = {
        name for layer in plan.pipelines[pipeline].stages[stage].layers for name in structure.trained_parameters(layer)
    }
    # A backward pass ends with the first layers, so the parameters of a bucket become final one soon after the other.
    for name in sorted(names, key=lambda name: (-structure.layers_with(name)[0], name)):
        # A tied parameter belongs to several layers, and to all workers that hold any of them. Where devices share a
        # stage, those of the same rank own the same share of a parameter.
        holders = {owner for layer in structure.layers_with(name) for owner in owners[layer]}
        living = tuple(
            sorted(
                owner
                for owner in holders
                if owner.node not in lost and (name in share.summed or owner.device % share.degree == share.rank)
            )
        )
        is_counted = share.rank == 0 or not share.is_whole(name)
        by_owners.setdefault((living, is_counted), []).append(name)
    buckets = [
        Bucket(key=key_of(members), parameters=parameters, is_counted=is_counted)
        for (members, is_counted), names_of in by_owners.items()
        for parameters in _cut(names_of, structure, max_elements)
    ]
    return tuple(sorted(buckets, key=lambda bucket: _rank(bucket, structure)))


def _cut(names: Sequence[str], structure: ModelStructure, max_elements: int) -> Iterator[tuple[str, ...]]:
    """Cut a list of parameters into runs of at most `max_elements`."""
    run: list[str] = []
    size = 0
    for name in names:
        elements = structure.shapes[name].numel()
        if run and size + elements > max_elements:
            yield tuple(run)
            run, size = [], 0
        run.append(name)
        size += elements
    if run:
        yield tuple(run)


def _rank(bucket: Bucket, structure: ModelStructure) -> tuple[int, GroupKey, str]:
    """Sort buckets in the order in which a backward pass completes them: by the first layer of all their parameters."""
    # Key and name settle ties, since any two workers must agree on the order.
    first_layer = min(structure.layers_with(name)[0] for name in bucket.parameters)
    return -first_layer, bucket.key, bucket.parameters[0]


class GradientReducer:
    """Sums gradients over their owners, bucket by bucket: the parameters' own, or others that `begin` receives.

    Buckets are posted in their order, by all workers, and waited for together.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[str, nn.Parameter],
        groups: GroupTable,
        *,
        stage: Group | None = None,
    ) -> None:
        """`stage` has the devices whose sums the gradients depend on; None if there is only one."""
        self.buckets = tuple(buckets)
        self.parameters = parameters
        self._groups = groups
        self._stage = stage
        # Sums run in flat copies, so that an interrupted one leaves every worker's own gradients whole.
        self._flats: dict[int, torch.Tensor] = {}
        self._pending: list[Reduction] = []
        self._num_posted = 0
        self._failure: PeerLost | Interrupted | None = None
        self._others: Mapping[str, torch.Tensor] | None = None

    def begin(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Post all buckets of these gradients; `finish` returns their sums. Raises nothing."""
        assert not self._num_posted, "sums are under way"
        self._others = gradients
        self._post_before(len(self.buckets))
        # Of what is not summed with others, nothing else tells whether the device has it, and has it right.
        if self._stage is not None and (whole := self._stage.when_whole()) is not None:
            self._pending.append(whole)

    def is_done(self) -> bool:
        """Return whether `finish` would not wait: all posted sums are complete, or one has failed."""
        return self._failure is not None or all(reduction.is_done() for reduction in self._pending)

    @property
    def poll_s(self) -> float | None:
        """Seconds between calls of `is_done`; None if the waiter is woken instead."""
        return min((each.poll_s for each in self._pending if each.poll_s is not None), default=None)

    @property
    def awaited(self) -> tuple[WorkerId, ...]:
        """The workers whose parts are missing."""
        return tuple(sorted({worker_id for each in self._pending if not each.is_done() for worker_id in each.others}))

    def abandon(self) -> None:
        # Sums that were given up may still write to these copies, so the next ones need others.
        self._flats = {}
        for reduction in self._pending:
            # On a GPU, a sum that is stuck in one group would hold up all others.
            reduction.give_up()
        self._forget()

    @contextmanager
    def overlapping(self, changing: Collection[str]) -> Iterator[None]:
        """Post each bucket as soon as its gradients are final; the block is the last backward pass of the step.

        It adds to the gradients of the parameters `changing`; all others are final. A failure is kept for `finish` to
        raise.
        """
        missing = [sum(name in changing for name in bucket.parameters) for bucket in self.buckets]
        handles = [
            self.parameters[name].register_post_accumulate_grad_hook(self._note(missing, index))  # type: ignore[no-untyped-call]
            for index, bucket in enumerate(self.buckets)
            if len(bucket.key.members) > 1
            for name in bucket.parameters
            if name in changing
        ]
        try:
            self._post_before(self._num_complete(missing))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(
        self, interrupted: Callable[[], bool], *, plus: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Post the remaining buckets, and return the sums by parameter, plus what `plus` has for it.

        `are_absent` tells the sums of parameters of which no worker has a gradient. Raises Interrupted or PeerLost; the
        parameters' own gradients keep their values either way.
        """
        try:
            self._post_before(len(self.buckets))
            if self._failure is not None:
                raise self._failure
            for reduction in self._pending:
                reduction.wait(interrupted)
            reduced: dict[str, torch.Tensor] = {}
            for index, bucket in enumerate(self.buckets):
                reduced.update(self._sums_of(index, bucket, plus or {}))
        except BaseException:
            self.abandon()
            raise
        self._forget()
        return reduced

    def _forget(self) -> None:
        self._pending, self._num_posted, self._failure, self._others = [], 0, None, None

    def _note(self, missing: list[int], index: int) -> Callable[[torch.Tensor], None]:
        """Make the hook that counts a bucket's final gradients, and posts complete buckets."""

        def hook(_parameter: torch.Tensor) -> None:
            missing[index] -= 1
            if missing[index] == 0:
                self._post_before(self._num_complete(missing))

        return hook

    def _num_complete(self, missing: Sequence[int]) -> int:
        """Count the buckets before the first one that is shared and lacks gradients."""
        # All members of a group post its sums in one order, so a bucket waits for those before it.
        return next((at for at, count in enumerate(missing) if count and self._is_shared(at)), len(missing))

    def _is_shared(self, index: int) -> bool:
        return len(self.buckets[index].key.members) > 1

    def _post_before(self, stop: int) -> None:
        while self._num_posted < stop and self._failure is None:
            index, bucket = self._num_posted, self.buckets[self._num_posted]
            self._num_posted += 1
            if not self._is_shared(index):
                continue
            flat = self._flats[index] = self._flatten(bucket, self._flats.get(index))
            try:
                self._pending.append(self._groups[bucket.key].all_reduce(flat, stage=self._stage))
            except (PeerLost, Interrupted) as error:
                # Not raised: this may run in a hook of the backward pass, whose own result is sound.
                self._failure = error

    def _flatten(self, bucket: Bucket, out: torch.Tensor | None) -> torch.Tensor:
        flat = [gradient.reshape(-1) for gradient in self._gradients(bucket)]
        with torch.no_grad():
            return torch.cat(flat) if out is None else torch.cat(flat, out=out)

    @torch.no_grad()
    def _gradients(self, bucket: Bucket) -> list[torch.Tensor]:
        gradients: list[torch.Tensor] = []
        firsts: list[torch.Tensor] = []
        for name in bucket.parameters:
            parameter = self.parameters[name]
            gradient = parameter.grad if self._others is None else self._others.get(name)
            if gradient is not None:
                gradients.append(gradient.detach())
                firsts += _first_of(gradients[-1:])
            else:
                # A worker without a gradient takes part as well: a sum needs all members of its group.
                gradients.append(torch.full_like(parameter, ABSENT).detach())
        if firsts:
            torch._foreach_add_(firsts, 0.0)  # it makes -0.0 to 0.0, and leaves all other numbers
        return gradients

    def _sums_of(
        self, index: int, bucket: Bucket, plus: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._is_shared(index):
            for name, own in zip(bucket.parameters, self._gradients(bucket), strict=True):
                yield name, own + plus[name] if name in plus else own
            return
        shapes = [self.parameters[name].shape for name in bucket.parameters]
        pieces = torch.split(self._flats[index], [shape.numel() for shape in shapes])
        for name, shape, piece in zip(bucket.parameters, shapes, pieces, strict=True):
            sums = piece.view(shape)
            yield name, sums.add_(plus[name]) if name in plus else sums


@dataclass(frozen=True, slots=True)
class PlanReducer:
    """The reducer of a plan, and the workers that take part."""

    committee: Committee
    reducer: GradientReducer


class Reducers:
    """This worker's buckets and reducers, for the plan in force and for a committee that ends a step without some of
    its nodes."""

    def __init__(self, worker_id: WorkerId, share: Share, state: StageState, groups: GroupTable) -> None:
        self.in_force: PlanReducer | None = None
        """The reducer of the plan in force; None for a spare."""
        self._worker_id = worker_id
        self._share = share
        self._state = state
        self._groups = groups
        self._buckets: tuple[Committee, tuple[Bucket, ...]] | None = None  # of the newest committee

    def adopt(self, committee: Committee | None, stage: Group | None) -> None:
        """Put a plan in force, whose layers the model holds, with the devices of the stage; None for a spare."""
        self.in_force = None if committee is None else PlanReducer(committee, self._new(committee, stage))

    def of(self, committee: Committee) -> GradientReducer:
        """Return the reducer of a committee: the one in force if it is the same, as that may have posted buckets."""
        in_force = self.in_force
        return in_force.reducer if in_force is not None and in_force.committee is committee else self._new(committee)

    def keys_of(self, committee: Committee | None) -> list[GroupKey]:
        """Return the groups in which this worker's gradients are summed with those of others."""
        return [] if committee is None else [bucket.key for bucket in self.buckets_of(committee)]

    def largest_of(self, committee: Committee | None) -> dict[GroupKey, int]:
        """Return the number of elements of the largest bucket of each of these groups."""
        shapes = self._share.structure.shapes
        largest: dict[GroupKey, int] = {}
        for bucket in () if committee is None else self.buckets_of(committee):
            size = sum(shapes[name].numel() for name in bucket.parameters)
            largest[bucket.key] = max(size, largest.get(bucket.key, 0))
        return largest

    def buckets_of(self, committee: Committee) -> tuple[Bucket, ...]:
        if self._buckets is None or self._buckets[0] is not committee:
            buckets = make_buckets(
                committee.plan, self._worker_id, self._share, key_of=committee.key_of, lost=committee.lost
            )
            self._buckets = committee, buckets
        return self._buckets[1]

    def _new(self, committee: Committee, stage: Group | None = None) -> GradientReducer:
        return GradientReducer(self.buckets_of(committee), self._state.parameters, self._groups, stage=stage)


def squared_norm(
    buckets: Sequence[Bucket], reduced: Mapping[str, torch.Tensor], worker_id: WorkerId
) -> torch.Tensor | None:
    """Return a worker's part of the squared global gradient norm, a scalar, or None if it has no part."""
    # All owners have the same sums, and the first one counts them.
    counted = [
        reduced[name]
        for bucket in buckets
        if bucket.is_counted and bucket.key.members[0] == worker_id
        for name in bucket.parameters
    ]
    if not counted:
        return None
    norms = torch.stack(torch._foreach_norm(counted)).double()
    return (norms * norms).sum()
