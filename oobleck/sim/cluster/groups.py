"""The groups that a virtual worker has formed, and the all-reduces in them: the twin of `training.comm.groups`.

Whose gradients are summed with whose, without parameters, as in `training.step.reduction`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oobleck.control.protocol import WorkerAddress
from oobleck.control.steps import CommitState, Committee, GroupKey
from oobleck.planner import WorkerId

from .fabric import Contribution, Violation, Wait, label
from .ports import Moves, WorkerPorts

Bucket = tuple[GroupKey, tuple[int, ...]]
"""A group, and the layers whose gradients it sums."""


@dataclass(frozen=True, slots=True)
class _Forming:
    """Groups that are being formed."""

    awaited: Mapping[GroupKey, Sequence[WorkerAddress]]
    until_s: float
    """When they are formed, if all others came when this worker did."""


class GroupTable:
    """The groups of one worker. Its members find each other by the addresses that their plan updates have told."""

    def __init__(self, ports: WorkerPorts, commit_state: CommitState) -> None:
        self._worker_id = commit_state.worker_id
        self._fabric, self._tempo, self._clock = ports.fabric, ports.tempo, ports.clock
        self._commit_state = commit_state
        self._formed: set[GroupKey] = set()
        self._forming: _Forming | None = None
        """What is formed beside what is computed."""
        self._posted: Counter[GroupKey] = Counter()
        self.address = self._fabric.address(self._worker_id)
        self._addresses = {self._worker_id: self.address}

    def know(self, addresses: Iterable[WorkerAddress]) -> None:
        """Take in where peers listen."""
        self._addresses.update((each.worker_id, each) for each in addresses if each.worker_id != self._worker_id)

    def form(self, keys: Sequence[GroupKey], *, beside: Sequence[GroupKey]) -> Generator[Wait, None, bool]:
        """Form those groups that are not yet. Returns whether some are formed `beside` what follows."""
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
        """Wait for those that are formed beside what is computed."""
        forming, self._forming = self._forming, None
        if forming is None:
            raise Violation(f"{self._worker_id} waits for groups that it does not form")
        yield from self._finish(forming)

    def abandon_forming(self) -> None:
        """Give up what is being formed, if anything is."""
        self._forming = None

    def _missing(self, keys: Sequence[GroupKey]) -> list[GroupKey]:
        return sorted({key for key in keys if len(key.members) > 1} - self._formed)

    def _begin(self, keys: Sequence[GroupKey]) -> _Forming:
        if unknown := {member for key in keys for member in key.members} - self._addresses.keys():
            raise Violation(f"{self._worker_id} is to form groups with {unknown}, and was not told where they listen")
        for key in keys:
            self._fabric.meet(key, self.address)
        until_s = self._clock() + self._tempo.forming_s([len(key.members) for key in keys])
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
        """Take part in a group's next all-reduce; returns its number."""
        if len(key.members) > 1 and key not in self._formed:
            raise Violation(f"{self._worker_id} has not formed {label(key)}")
        sequence = self._posted[key]
        self._posted[key] += 1
        self._fabric.post(key, sequence, self._worker_id, value)
        return sequence

    def sum(
        self, key: GroupKey, sequence: int, step: int, *, takes_s: float = 0.0
    ) -> Generator[Wait, None, tuple[int, ...]]:
        """Wait for what all brought to an all-reduce of a step, put together."""
        yield Wait(
            f"all-reduce {sequence} of {label(key)} in step {step}",
            lambda: self._fabric.is_complete(key, sequence),
            self._commit_state.is_fenced,
            lambda: self._fabric.lacks_a_member(key),
            touches_network=len(key.members) > 1,
            takes_s=takes_s,
        )
        return self._fabric.total(key, sequence, step)


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
