"""The groups of a virtual worker, and the all-reduces in them: the twin of `training.comm.groups`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oobleck.control.protocol import WorkerAddress
from oobleck.control.steps import CommitState, Committee, GroupKey
from oobleck.job import JobSpec, Sharding
from oobleck.planner import WorkerId

from .fabric import Contribution, Violation, Wait, label
from .layers import HeldLayers
from .ports import Moves, WorkerPorts

Bucket = tuple[GroupKey, tuple[int, ...]]
"""A group, and the layers whose gradients it sums."""


@dataclass(frozen=True, slots=True)
class _Forming:
    awaited: Mapping[GroupKey, Sequence[WorkerAddress]]
    until_s: float
    """When they are formed, if all other members began with this worker."""


class GroupTable:
    """The groups of one worker; members find each other by the addresses in plan orders."""

    def __init__(self, ports: WorkerPorts, commit_state: CommitState) -> None:
        self._worker_id = commit_state.worker_id
        self._fabric, self._tempo, self._clock = ports.fabric, ports.tempo, ports.clock
        self._commit_state = commit_state
        self._formed: set[GroupKey] = set()
        self._forming: _Forming | None = None  # groups that form while the worker computes
        self._posted: Counter[GroupKey] = Counter()
        self.address = self._fabric.address(self._worker_id)
        self._addresses = {self._worker_id: self.address}

    def know(self, addresses: Iterable[WorkerAddress]) -> None:
        self._addresses.update((each.worker_id, each) for each in addresses if each.worker_id != self._worker_id)

    def form(self, keys: Sequence[GroupKey], *, beside: Sequence[GroupKey]) -> Generator[Wait, None, bool]:
        """Form missing groups; return whether some of `beside` keep forming while the worker continues."""
        missing = self._missing(keys)
        later = [key for key in self._missing(beside) if key not in missing]
        if not self._tempo.forms_beside:
            missing, later = sorted([*missing, *later]), []
        if later:
            if self._forming is not None:
                raise Violation(f"{self._worker_id} forms groups beside {self._forming.awaited}")
            self._forming = self._begin(later)
        if missing:
            yield from self._finish(self._begin(missing))
        return bool(later)

    def await_formed(self) -> Moves:
        """Wait for the groups that form while the worker computes."""
        forming, self._forming = self._forming, None
        if forming is None:
            raise Violation(f"{self._worker_id} waits for groups that it does not form")
        yield from self._finish(forming)

    def abandon_forming(self) -> None:
        self._forming = None

    def _missing(self, keys: Sequence[GroupKey]) -> list[GroupKey]:
        return sorted({key for key in keys if len(key.members) > 1} - self._formed)

    def _begin(self, keys: Sequence[GroupKey]) -> _Forming:
        if unknown := {member for key in keys for member in key.members} - self._addresses.keys():
            raise Violation(f"{self._worker_id} is to form groups with {unknown}, whose addresses it does not know")
        for key in keys:
            self._fabric.meet(key, self.address)
        until_s = self._clock() + self._tempo.costs.forming_s([len(key.members) for key in keys])
        return _Forming({key: [self._addresses[member] for member in key.members] for key in keys}, until_s)

    def _finish(self, forming: _Forming) -> Moves:
        yield Wait(
            f"the groups {', '.join(map(label, forming.awaited))}",
            lambda: all(self._fabric.have_met(key, addresses) for key, addresses in forming.awaited.items()),
            self._commit_state.is_fenced,
            lambda: any(map(self._fabric.lacks_a_member, forming.awaited)),
            touches_network=True,
            takes_s=max(0.0, forming.until_s - self._clock()),
        )
        for key in forming.awaited:
            self._fabric.note_formed(key)
        self._formed.update(forming.awaited)

    def keep(self, keys: Collection[GroupKey]) -> None:
        self._formed.intersection_update(keys)
        self._posted = Counter({key: self._posted[key] for key in keys})

    def leave(self, keys: Collection[GroupKey]) -> None:
        self._formed.difference_update(keys)

    def post(self, key: GroupKey, value: Contribution) -> int:
        """Contribute to a group's next all-reduce; return its sequence number."""
        if len(key.members) > 1 and key not in self._formed:
            raise Violation(f"{self._worker_id} has not formed {label(key)}")
        sequence = self._posted[key]
        self._posted[key] += 1
        self._fabric.post(key, sequence, self._worker_id, value)
        return sequence

    def sum(
        self,
        key: GroupKey,
        sequence: int,
        step: int,
        *,
        takes_s: float = 0.0,
        interrupted: Callable[[], bool] | None = None,
    ) -> Generator[Wait, None, tuple[int, ...]]:
        """Wait for an all-reduce of a step until `interrupted`, by default by a fence, and return its total."""
        yield Wait(
            f"all-reduce {sequence} of {label(key)} in step {step}",
            lambda: self._fabric.is_complete(key, sequence),
            interrupted or self._commit_state.is_fenced,
            lambda: self._fabric.lacks_a_member(key),
            touches_network=len(key.members) > 1,
            takes_s=takes_s,
        )
        return self._fabric.total(key, sequence, step)


def buckets_of(committee: Committee, worker_id: WorkerId, *, degree: int = 1) -> tuple[Bucket, ...]:
    """Return a worker's layers by their owners in a committee, of the same rank where `degree` devices share stages."""
    located = committee.plan.locate(worker_id)
    assert located is not None
    pipeline, stage = located
    by_owners: dict[tuple[WorkerId, ...], list[int]] = {}
    for layer in committee.plan.pipelines[pipeline].stages[stage].layers:
        alike = [each for each in committee.plan.owners_of(layer) if (each.device - worker_id.device) % degree == 0]
        living = tuple(owner for owner in alike if owner.node not in committee.lost)
        by_owners.setdefault(living, []).append(layer)
    # As in `training.step.reduction`, but by layers: sorted, since all owners have to post their sums in one order.
    return tuple((committee.key_of(members), tuple(layers)) for members, layers in sorted(by_owners.items()))


class NodeSums:
    """Collectives of the devices of a sharded stage: the twin of `training.step.node_sums`."""

    def __init__(self, job: JobSpec, commit_state: CommitState, groups: GroupTable, layers: HeldLayers) -> None:
        self._worker_id, self._stopped = commit_state.worker_id, commit_state.is_pipeline_stopped
        self._groups, self._layers = groups, layers
        self._num_devices, self._sharding = job.sharding_devices, job.shardings[0]

    def adopt(self, sharding: Sharding | None) -> None:
        """Share out what the plan says, if it says anything."""
        self._sharding = sharding or self._sharding

    def begin(self, key: GroupKey, step: int, *, interrupted: Callable[[], bool] | None = None) -> Moves:
        """Begin a program, or an evaluation: take all weights, unless each pass takes its own."""
        if self._sharding != "all":
            yield from self._gather(key, step, interrupted=interrupted)

    def _gather(self, key: GroupKey, step: int, *, interrupted: Callable[[], bool] | None = None) -> Moves:
        """Take all devices' shares of the weights with which `step` is computed."""
        # Shares of several steps would be no model's weights.
        own = Contribution(step, (), self._layers.weights())
        if self._num_devices > 1:
            sequence = self._groups.post(key, own)
            yield from self._groups.sum(key, sequence, step, interrupted=interrupted or self._stopped)

    def forward(self, key: GroupKey, step: int) -> Moves:
        """Take the weights of a forward pass, where each takes its own."""
        if self._sharding == "all":
            yield from self._gather(key, step)

    def backward(self, key: GroupKey, step: int, microbatch: int) -> Moves:
        """Take the weights of a backward pass, and sum its gradients, where each has sums."""
        yield from self.forward(key, step)
        if self._sharding != "optimizer":
            yield from self._sum(key, step, [microbatch])

    def conclude(self, key: GroupKey, step: int, microbatches: Sequence[int]) -> Moves:
        """Sum the gradients of a plan's microbatches, unless that was done in their passes."""
        if self._sharding == "optimizer":
            yield from self._sum(key, step, microbatches)

    def _sum(self, key: GroupKey, step: int, microbatches: Sequence[int]) -> Moves:
        """Sum gradients of microbatches, of which each device has computed its own."""
        if self._num_devices == 1:
            return
        devices = range(self._num_devices)
        mine = tuple(each * self._num_devices + self._worker_id.device % self._num_devices for each in microbatches)
        sequence = self._groups.post(key, Contribution(step, mine))
        summed = yield from self._groups.sum(key, sequence, step, interrupted=self._stopped)
        if summed != tuple(sorted(each * self._num_devices + device for each in microbatches for device in devices)):
            raise Violation(f"{self._worker_id} computes {microbatches} of step {step}, and its node sums {summed}")
